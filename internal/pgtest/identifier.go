package pgtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
)

// changeIdentifier makes the copy of a cluster that has never been started, in the
// data folder below folder, a cluster of its own: with the system identifier that
// initdb would have chosen some microseconds later. There are no tools for that.
//
// The identifier is what the control file begins with, and in the header of each
// WAL segment, of which there is one.
func changeIdentifier(folder string, microseconds uint64) error {
	controlPath := filepath.Join(folder, "data", controlFile)
	control, err := os.ReadFile(controlPath)
	if err != nil {
		return fmt.Errorf("pgtest: read a cluster's control file: %w", err)
	}
	end, err := controlChecksum(control)
	if err != nil {
		return err
	}
	before := bytes.Clone(control[:8])
	// See BootStrapXLOG: seconds, 20 bits of microseconds, 12 bits of a process id.
	id := binary.NativeEndian.Uint64(before) + microseconds<<12
	binary.NativeEndian.PutUint64(control, id)
	binary.NativeEndian.PutUint32(control[end:], crc32.Checksum(control[:end], castagnoli))

	segments, err := filepath.Glob(filepath.Join(folder, "data", walFolder, "????????????????????????"))
	if err != nil {
		return fmt.Errorf("pgtest: find a cluster's WAL: %w", err)
	}
	if len(segments) != 1 {
		return fmt.Errorf("pgtest: a new cluster has %d segments of WAL instead of one", len(segments))
	}
	wal, err := os.ReadFile(segments[0])
	if err != nil {
		return fmt.Errorf("pgtest: read a cluster's WAL: %w", err)
	}
	const header = 40 // XLogLongPageHeaderData; where in it depends on the alignment
	at := bytes.Index(wal[:min(header, len(wal))], before)
	if at < 0 {
		return errors.New("pgtest: a cluster's WAL does not begin with its system identifier")
	}
	return errors.Join(
		overwrite(controlPath, 0, control[:end+4]),
		overwrite(segments[0], int64(at), control[:8]),
	)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// controlChecksum returns the offset of the checksum in a control file, which is
// of all that is before it. How much that is depends on the version.
func controlChecksum(control []byte) (int, error) {
	const fields = 512 // all of them are within the first sector
	for end := 8; end+4 <= min(fields, len(control)); end += 4 {
		if crc32.Checksum(control[:end], castagnoli) == binary.NativeEndian.Uint32(control[end:]) {
			return end, nil
		}
	}
	return 0, errors.New("pgtest: a cluster's control file has no checksum")
}

// overwrite changes some bytes of a file, which keeps its owner.
func overwrite(path string, offset int64, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("pgtest: change a new cluster: %w", err)
	}
	_, err = f.WriteAt(data, offset)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("pgtest: change a new cluster: %w", err)
	}
	return nil
}
