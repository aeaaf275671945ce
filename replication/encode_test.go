package replication

import (
	"encoding/binary"
	"math/rand/v2"
	"time"
)

// encode writes an event as pgoutput does: the model that the decoder is
// compared with.
func encode(event Event) []byte {
	switch e := event.(type) {
	case *Begin:
		return output{'B'}.uint64(uint64(e.FinalLSN)).time(e.CommitTime).uint32(e.XID)
	case *Commit:
		return output{'C', 0}.uint64(uint64(e.CommitLSN)).uint64(uint64(e.EndLSN)).time(e.CommitTime)
	case *Insert:
		return output{'I'}.uint32(e.Relation.OID).tuple('N', e.New)
	case *Update:
		out := output{'U'}.uint32(e.Relation.OID)
		if e.OldKind != OldNone {
			out = out.tuple(byte(e.OldKind), e.Old)
		}
		return out.tuple('N', e.New)
	case *Delete:
		return output{'D'}.uint32(e.Relation.OID).tuple(byte(e.OldKind), e.Old)
	case *Truncate:
		out := output{'T'}.uint32(uint32(len(e.Relations)))
		out = append(out, flag(e.Cascade, 1)|flag(e.RestartIdentity, 2))
		for _, relation := range e.Relations {
			out = out.uint32(relation.OID)
		}
		return out
	case *Message:
		out := output{'M', flag(e.Transactional, 1)}.uint64(uint64(e.LSN)).text(e.Prefix)
		return append(out.uint32(uint32(len(e.Content))), e.Content...)
	case *Relation:
		out := append(output{'R'}.uint32(e.OID).text(e.Schema).text(e.Name), e.Identity)
		out = out.uint16(uint16(len(e.Columns)))
		for _, column := range e.Columns {
			out = append(out, flag(column.Key, 1)).text(column.Name)
			out = out.uint32(column.TypeOID).uint32(uint32(column.TypeModifier))
		}
		return out
	case *Type:
		return output{'Y'}.uint32(e.OID).text(e.Schema).text(e.Name)
	case *Origin:
		return output{'O'}.uint64(uint64(e.CommitLSN)).text(e.Name)
	}
	panic("not a message of the output plugin")
}

type output []byte

func (o output) uint16(n uint16) output { return binary.BigEndian.AppendUint16(o, n) }
func (o output) uint32(n uint32) output { return binary.BigEndian.AppendUint32(o, n) }
func (o output) uint64(n uint64) output { return binary.BigEndian.AppendUint64(o, n) }
func (o output) text(s string) output   { return append(append(o, s...), 0) }

func (o output) time(t time.Time) output {
	return o.uint64(uint64(t.UnixMicro() - time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()))
}

func (o output) tuple(kind byte, tuple Tuple) output {
	o = append(o, kind).uint16(uint16(len(tuple)))
	for _, value := range tuple {
		o = append(o, byte(value.Kind))
		if value.Kind == Text || value.Kind == Binary {
			o = append(o.uint32(uint32(len(value.Data))), value.Data...)
		}
	}
	return o
}

func flag(set bool, bit byte) byte {
	if set {
		return bit
	}
	return 0
}

// data puts a message of the output plugin into the frame it comes in.
func data(lsn LSN, message []byte) []byte {
	out := output{'w'}.uint64(uint64(lsn)).uint64(uint64(lsn)).time(time.Now())
	return append(out, message...)
}

// keepalive is a keepalive's frame.
func keepalive(end LSN, reply bool) []byte {
	return append(output{'k'}.uint64(uint64(end)).time(time.Now()), flag(reply, 1))
}

// random makes up events, among which relations come before what uses them.
type random struct {
	*rand.Rand
	relations []*Relation
}

func (r *random) event() Event {
	if len(r.relations) == 0 || r.IntN(20) == 0 {
		return r.relation()
	}
	lsn := LSN(r.Uint64())
	switch r.IntN(9) {
	case 0:
		return &Begin{LSN: lsn, FinalLSN: LSN(r.Uint64()), CommitTime: r.time(), XID: r.Uint32()}
	case 1:
		return &Commit{CommitLSN: LSN(r.Uint64()), EndLSN: LSN(r.Uint64()), CommitTime: r.time()}
	case 2:
		relation := r.known()
		return &Insert{LSN: lsn, Relation: relation, New: r.tuple(relation)}
	case 3:
		relation := r.known()
		update := &Update{LSN: lsn, Relation: relation, New: r.tuple(relation)}
		if r.IntN(3) > 0 {
			update.OldKind, update.Old = OldKey, r.tuple(relation)
		}
		return update
	case 4:
		relation := r.known()
		return &Delete{LSN: lsn, Relation: relation, OldKind: OldRow, Old: r.tuple(relation)}
	case 5:
		truncate := &Truncate{LSN: lsn, Cascade: r.IntN(2) == 0, RestartIdentity: r.IntN(2) == 0}
		for range 1 + r.IntN(4) {
			truncate.Relations = append(truncate.Relations, r.known())
		}
		return truncate
	case 6:
		return &Message{LSN: lsn, Transactional: r.IntN(2) == 0, Prefix: r.text(), Content: r.bytes()}
	case 7:
		return &Type{OID: r.Uint32(), Schema: r.text(), Name: r.text()}
	default:
		return &Origin{CommitLSN: LSN(r.Uint64()), Name: r.text()}
	}
}

func (r *random) relation() *Relation {
	relation := &Relation{OID: r.Uint32N(5), Schema: r.text(), Name: r.text(), Identity: "dnfi"[r.IntN(4)], Columns: []Column{}}
	for range r.IntN(6) {
		relation.Columns = append(relation.Columns, Column{
			Name: r.text(), Key: r.IntN(2) == 0, TypeOID: r.Uint32(), TypeModifier: int32(r.Uint32()),
		})
	}
	for i, known := range r.relations {
		if known.OID == relation.OID {
			r.relations[i] = relation
			return relation
		}
	}
	r.relations = append(r.relations, relation)
	return relation
}

func (r *random) known() *Relation { return r.relations[r.IntN(len(r.relations))] }

func (r *random) tuple(relation *Relation) Tuple {
	tuple := make(Tuple, len(relation.Columns))
	for i := range tuple {
		tuple[i].Kind = []ValueKind{Null, Unchanged, Text, Binary}[r.IntN(4)]
		if tuple[i].Kind == Text || tuple[i].Kind == Binary {
			tuple[i].Data = r.bytes()
		}
	}
	return tuple
}

func (r *random) time() time.Time { return time.UnixMicro(r.Int64N(4e15)).UTC() }

func (r *random) text() string { return []string{"", "a", "orders", `Odd "name"`, "ä"}[r.IntN(5)] }

func (r *random) bytes() []byte {
	b := make([]byte, r.IntN(40))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}
