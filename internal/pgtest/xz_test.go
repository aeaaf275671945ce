package pgtest

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
)

// xzStored wraps data in the .xz format without compressing it, for a download
// made by a test: neither the standard library nor every machine has a
// compressor.
//
// See "The .xz File Format", 1.1.0: one block of LZMA2 chunks that are stored.
func xzStored(data []byte) []byte {
	var out bytes.Buffer
	flags := []byte{0, 1} // check: CRC32

	out.WriteString("\xfd7zXZ\x00")
	out.Write(flags)
	out.Write(crc(flags))

	blockStart := out.Len()
	// Size 8 (in words, less one: 2 words), one filter, LZMA2 (0x21) with one
	// byte of properties: a dictionary of 64 KiB or more.
	header := []byte{2, 0, 0x21, 1, 8, 0, 0, 0}
	out.Write(header)
	out.Write(crc(header))
	control := byte(1) // stored, reset the dictionary
	for rest := data; len(rest) > 0; {
		n := min(len(rest), 1<<16)
		out.WriteByte(control)
		out.Write(binary.BigEndian.AppendUint16(nil, uint16(n-1)))
		out.Write(rest[:n])
		rest = rest[n:]
		control = 2 // stored
	}
	out.WriteByte(0)
	unpadded := out.Len() - blockStart + 4
	pad(&out, blockStart)
	out.Write(crc(data))

	indexStart := out.Len()
	index := []byte{0, 1} // one record
	index = binary.AppendUvarint(index, uint64(unpadded))
	index = binary.AppendUvarint(index, uint64(len(data)))
	for len(index)%4 != 0 {
		index = append(index, 0)
	}
	out.Write(index)
	out.Write(crc(index))

	footer := binary.LittleEndian.AppendUint32(nil, uint32((out.Len()-indexStart)/4-1))
	footer = append(footer, flags...)
	out.Write(crc(footer))
	out.Write(footer)
	out.WriteString("YZ")
	return out.Bytes()
}

func crc(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(b))
}

func pad(out *bytes.Buffer, start int) {
	for (out.Len()-start)%4 != 0 {
		out.WriteByte(0)
	}
}
