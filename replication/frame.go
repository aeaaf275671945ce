package replication

import (
	"encoding/binary"
	"time"
)

// First bytes of what the server sends while it streams.
const (
	frameData      = 'w'
	frameKeepalive = 'k'

	dataHeader      = 1 + 8 + 8 + 8         // kind, start and end of the WAL in it, server's time
	keepaliveLength = 1 + 8 + 8 + 1         // kind, end of WAL, server's time, reply requested
	statusLength    = 1 + 8 + 8 + 8 + 8 + 1 // kind, three positions, client's time, reply requested
)

// frame is what the server sends while it streams: a message of the output
// plugin, or a keepalive.
type frame struct {
	kind byte
	// lsn is the message's position, or the keepalive's end of WAL.
	lsn LSN
	// data is the output plugin's message.
	data []byte
	// serverTime and replyRequested are the keepalive's.
	serverTime     time.Time
	replyRequested bool
}

// parseFrame parses the body of a CopyData message, of which the result is part.
func parseFrame(body []byte) (frame, error) {
	if len(body) == 0 {
		return frame{}, &Error{Op: "read", Reason: ErrProtocol, Err: &DecodeError{Problem: "is empty"}}
	}
	switch kind := body[0]; {
	case kind == frameData && len(body) >= dataHeader:
		return frame{kind: kind, lsn: LSN(binary.BigEndian.Uint64(body[1:])), data: body[dataHeader:]}, nil
	case kind == frameKeepalive && len(body) == keepaliveLength:
		return frame{
			kind: kind, lsn: LSN(binary.BigEndian.Uint64(body[1:])),
			serverTime: fromServerTime(binary.BigEndian.Uint64(body[9:])), replyRequested: body[17] != 0,
		}, nil
	case kind == frameData, kind == frameKeepalive:
		return frame{}, &Error{Op: "read", Reason: ErrProtocol, Err: &DecodeError{Kind: kind, Problem: "has a wrong length"}}
	default:
		return frame{}, &Error{Op: "read", Reason: ErrProtocol, Err: &DecodeError{Kind: kind, Problem: "is of an unknown kind"}}
	}
}

// goesOn reports whether more is certain to follow soon: the rest of the
// transaction.
func (f frame) goesOn() bool {
	if f.kind != frameData || len(f.data) == 0 {
		return false
	}
	switch f.data[0] {
	case kindBegin, kindOrigin, kindRelation, kindType, kindInsert, kindUpdate, kindDelete, kindTruncate:
		return true
	}
	return false
}

// event decodes a frame.
func (d *Decoder) event(f frame) (Event, error) {
	if f.kind == frameKeepalive {
		d.keepalive = Keepalive{WALEnd: f.lsn, ServerTime: f.serverTime}
		return &d.keepalive, nil
	}
	return d.Decode(f.lsn, f.data)
}

// appendStatus appends a CopyData message with a status. Unlike pglogrepl it
// takes a position of zero as what it is, none yet.
func appendStatus(buf []byte, p Positions, now time.Time, replyRequested bool) []byte {
	buf = append(buf, 'd')
	buf = binary.BigEndian.AppendUint32(buf, 4+statusLength)
	buf = append(buf, 'r')
	buf = binary.BigEndian.AppendUint64(buf, uint64(p.Write))
	buf = binary.BigEndian.AppendUint64(buf, uint64(p.Flush))
	buf = binary.BigEndian.AppendUint64(buf, uint64(p.Apply))
	buf = binary.BigEndian.AppendUint64(buf, toServerTime(now))
	if replyRequested {
		return append(buf, 1)
	}
	return append(buf, 0)
}
