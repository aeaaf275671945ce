package replication

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"
)

// First bytes of pgoutput's messages.
const (
	kindBegin    = 'B'
	kindMessage  = 'M'
	kindCommit   = 'C'
	kindOrigin   = 'O'
	kindRelation = 'R'
	kindType     = 'Y'
	kindInsert   = 'I'
	kindUpdate   = 'U'
	kindDelete   = 'D'
	kindTruncate = 'T'

	// kindNew introduces the new tuple of a change.
	kindNew = 'N'
)

// Bits of messages' flags.
const (
	flagKeyColumn       = 1
	flagTransactional   = 1
	flagCascade         = 1
	flagRestartIdentity = 2
)

// Decoder decodes the messages of the output plugin pgoutput, of one stream and
// in its order, since changes refer to relations that came before. Streams have
// one; it is exported for those who get such messages in another way, as from
// pg_logical_slot_get_binary_changes. The zero value is ready. Not safe for
// concurrent use.
type Decoder struct {
	relations map[uint32]*Relation

	// One of each kind, for the event returned last.
	begin     Begin
	commit    Commit
	insert    Insert
	update    Update
	delete    Delete
	truncate  Truncate
	message   Message
	typ       Type
	origin    Origin
	keepalive Keepalive

	// Backing of tuples.
	old, new Tuple
}

// Decode decodes one message. lsn is the position that came with it. The event
// is valid until the next call, and as long as data is not changed: values are
// parts of data. The error is a *DecodeError; the stream cannot be decoded any
// further then.
func (d *Decoder) Decode(lsn LSN, data []byte) (Event, error) {
	if len(data) == 0 {
		return nil, &DecodeError{LSN: lsn, Problem: "is empty"}
	}
	in := input{rest: data[1:]}
	event, problem := d.decode(data[0], lsn, &in)
	switch {
	case problem != "":
	case in.short:
		problem = "is too short"
	case len(in.rest) > 0:
		problem = fmt.Sprintf("has %d bytes too many", len(in.rest))
	default:
		return event, nil
	}
	return nil, &DecodeError{LSN: lsn, Kind: data[0], Problem: problem}
}

// decode returns an event, or what is wrong with the message. Whether in had
// all of it is the caller's to check.
func (d *Decoder) decode(kind byte, lsn LSN, in *input) (event Event, problem string) {
	switch kind {
	case kindBegin:
		d.begin = Begin{LSN: lsn, FinalLSN: in.lsn(), CommitTime: in.time(), XID: in.uint32()}
		return &d.begin, ""
	case kindCommit:
		if flags := in.byte(); flags != 0 {
			return nil, fmt.Sprintf("has unknown flags %#x", flags)
		}
		d.commit = Commit{CommitLSN: in.lsn(), EndLSN: in.lsn(), CommitTime: in.time()}
		return &d.commit, ""
	case kindInsert:
		return d.decodeInsert(lsn, in)
	case kindUpdate:
		return d.decodeUpdate(lsn, in)
	case kindDelete:
		return d.decodeDelete(lsn, in)
	case kindTruncate:
		return d.decodeTruncate(lsn, in)
	case kindRelation:
		return d.decodeRelation(in)
	case kindMessage:
		return d.decodeMessage(in)
	case kindType:
		d.typ = Type{OID: in.uint32(), Schema: string(in.text()), Name: string(in.text())}
		return &d.typ, ""
	case kindOrigin:
		d.origin = Origin{CommitLSN: in.lsn(), Name: string(in.text())}
		return &d.origin, ""
	}
	return nil, "is of an unknown kind"
}

func (d *Decoder) decodeInsert(lsn LSN, in *input) (Event, string) {
	relation, problem := d.relation(in.uint32(), in)
	if problem != "" {
		return nil, problem
	}
	if kind := in.byte(); kind != kindNew {
		return nil, fmt.Sprintf("has a tuple %q", rune(kind))
	}
	if d.new, problem = in.tuple(d.new, relation); problem != "" {
		return nil, problem
	}
	d.insert = Insert{LSN: lsn, Relation: relation, New: d.new}
	return &d.insert, ""
}

func (d *Decoder) decodeUpdate(lsn LSN, in *input) (Event, string) {
	relation, problem := d.relation(in.uint32(), in)
	if problem != "" {
		return nil, problem
	}
	d.update = Update{LSN: lsn, Relation: relation}
	kind := in.byte()
	if OldKind(kind) == OldKey || OldKind(kind) == OldRow {
		if d.old, problem = in.tuple(d.old, relation); problem != "" {
			return nil, problem
		}
		d.update.OldKind, d.update.Old = OldKind(kind), d.old
		kind = in.byte()
	}
	if kind != kindNew {
		return nil, fmt.Sprintf("has a tuple %q", rune(kind))
	}
	if d.new, problem = in.tuple(d.new, relation); problem != "" {
		return nil, problem
	}
	d.update.New = d.new
	return &d.update, ""
}

func (d *Decoder) decodeDelete(lsn LSN, in *input) (Event, string) {
	relation, problem := d.relation(in.uint32(), in)
	if problem != "" {
		return nil, problem
	}
	kind := OldKind(in.byte())
	if kind != OldKey && kind != OldRow {
		return nil, fmt.Sprintf("has a tuple %q", rune(kind))
	}
	if d.old, problem = in.tuple(d.old, relation); problem != "" {
		return nil, problem
	}
	d.delete = Delete{LSN: lsn, Relation: relation, OldKind: kind, Old: d.old}
	return &d.delete, ""
}

func (d *Decoder) decodeTruncate(lsn LSN, in *input) (Event, string) {
	count, flags := in.uint32(), in.byte()
	if flags&^(flagCascade|flagRestartIdentity) != 0 {
		return nil, fmt.Sprintf("has unknown flags %#x", flags)
	}
	relations := d.truncate.Relations[:0]
	for range count {
		relation, problem := d.relation(in.uint32(), in)
		if problem != "" {
			return nil, problem
		}
		relations = append(relations, relation)
	}
	d.truncate = Truncate{
		LSN: lsn, Relations: relations,
		Cascade: flags&flagCascade != 0, RestartIdentity: flags&flagRestartIdentity != 0,
	}
	return &d.truncate, ""
}

// minColumn is how long a column of a relation is at least: flags, an empty
// name, type and modifier.
const minColumn = 1 + 1 + 4 + 4

func (d *Decoder) decodeRelation(in *input) (Event, string) {
	relation := &Relation{OID: in.uint32(), Schema: string(in.text()), Name: string(in.text()), Identity: in.byte()}
	count := int(in.uint16())
	if count*minColumn > len(in.rest) {
		in.short = true
		return nil, ""
	}
	relation.Columns = make([]Column, count)
	for i := range relation.Columns {
		flags := in.byte()
		if flags&^flagKeyColumn != 0 {
			return nil, fmt.Sprintf("has a column with unknown flags %#x", flags)
		}
		relation.Columns[i] = Column{
			Key: flags == flagKeyColumn, Name: string(in.text()), TypeOID: in.uint32(), TypeModifier: in.int32(),
		}
	}
	if in.short || len(in.rest) > 0 {
		// Decode says so. The relation before this one stays in force.
		return nil, ""
	}
	if d.relations == nil {
		d.relations = map[uint32]*Relation{}
	}
	d.relations[relation.OID] = relation
	return relation, ""
}

func (d *Decoder) decodeMessage(in *input) (Event, string) {
	flags := in.byte()
	if flags&^flagTransactional != 0 {
		return nil, fmt.Sprintf("has unknown flags %#x", flags)
	}
	lsn, prefix := in.lsn(), in.text()
	// Prefixes are few, and most often the same as before.
	if string(prefix) != d.message.Prefix {
		d.message.Prefix = string(prefix)
	}
	d.message.LSN, d.message.Transactional = lsn, flags == flagTransactional
	d.message.Content = in.bytes(in.uint32())
	return &d.message, ""
}

// relation returns the relation with an oid that was read from in.
func (d *Decoder) relation(oid uint32, in *input) (*Relation, string) {
	relation := d.relations[oid]
	if relation == nil && !in.short {
		return nil, fmt.Sprintf("is about relation %d, which was not described before", oid)
	}
	if relation == nil {
		return nil, "is too short"
	}
	return relation, ""
}

// input is what is left of a message. Reading past its end sets short, and
// gives zeros.
type input struct {
	rest  []byte
	short bool
}

// bytes returns the next n bytes, which alias the message.
func (in *input) bytes(n uint32) []byte {
	if uint64(n) > uint64(len(in.rest)) {
		in.short = true
		in.rest = nil
		return nil
	}
	b := in.rest[:n:n]
	in.rest = in.rest[n:]
	return b
}

func (in *input) byte() byte {
	if b := in.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

func (in *input) uint16() uint16 {
	if b := in.bytes(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (in *input) uint32() uint32 {
	if b := in.bytes(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (in *input) int32() int32 { return int32(in.uint32()) } //nolint:gosec // the wire has its bits

func (in *input) uint64() uint64 {
	if b := in.bytes(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (in *input) lsn() LSN { return LSN(in.uint64()) }

func (in *input) time() time.Time { return fromServerTime(in.uint64()) }

// text returns the next text without the NUL at its end.
func (in *input) text() []byte {
	end := bytes.IndexByte(in.rest, 0)
	if end < 0 {
		in.short = true
		in.rest = nil
		return nil
	}
	text := in.rest[:end:end]
	in.rest = in.rest[end+1:]
	return text
}

// tuple reads a tuple of a relation into the memory of another one.
func (in *input) tuple(into Tuple, relation *Relation) (Tuple, string) {
	count := int(in.uint16())
	if in.short {
		return into, "is too short"
	}
	if count != len(relation.Columns) {
		return into, fmt.Sprintf("has a tuple of %d values for the %d columns of %s.%s", count, len(relation.Columns), relation.Schema, relation.Name)
	}
	// A nil tuple is one that was not sent.
	if into == nil || cap(into) < count {
		into = make(Tuple, count)
	}
	into = into[:count]
	for i := range into {
		value := &into[i]
		value.Kind = ValueKind(in.byte())
		switch value.Kind {
		case Null, Unchanged:
			value.Data = nil
		case Text, Binary:
			value.Data = in.bytes(in.uint32())
		default:
			if in.short {
				return into, "is too short"
			}
			return into, fmt.Sprintf("has a value of unknown kind %q", rune(value.Kind))
		}
	}
	return into, ""
}

// serverEpoch is the beginning of PostgreSQL's time, 2000-01-01, in microseconds
// of Unix's.
const serverEpoch = 946_684_800_000_000

func fromServerTime(microseconds uint64) time.Time {
	return time.UnixMicro(int64(microseconds) + serverEpoch).UTC() //nolint:gosec // the wire has its bits
}

func toServerTime(t time.Time) uint64 {
	return uint64(t.UnixMicro() - serverEpoch) //nolint:gosec // the wire has its bits
}
