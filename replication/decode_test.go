package replication

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/jackc/pglogrepl"
	"github.com/stretchr/testify/require"
)

// What is encoded is decoded again, whatever came before it in the same decoder.
func TestDecodeRandom(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	r := &random{Rand: rand.New(rand.NewPCG(seed, 0))}
	var d Decoder
	for i := range 20_000 {
		want := r.event()
		got, err := d.Decode(lsnOf(want), encode(want))
		require.NoError(t, err, "seed %d, event %d: %#v", seed, i, want)
		require.Equal(t, want, got, "seed %d, event %d", seed, i)
	}
}

// lsnOf is the position that comes with an event.
func lsnOf(event Event) LSN {
	switch e := event.(type) {
	case *Begin:
		return e.LSN
	case *Insert:
		return e.LSN
	case *Update:
		return e.LSN
	case *Delete:
		return e.LSN
	case *Truncate:
		return e.LSN
	}
	return 7
}

// A message that is cut anywhere, or has something behind it, is an error that
// names its position; so it is after a relation that cannot be read.
func TestDecodeDamaged(t *testing.T) {
	t.Parallel()
	r := &random{Rand: rand.New(rand.NewPCG(1, 2))}
	var d Decoder
	var decodeErr *DecodeError
	for range 2_000 {
		message := encode(r.event())
		for cut := range message {
			_, err := d.Decode(42, message[:cut:cut])
			require.ErrorAs(t, err, &decodeErr, "%x cut to %d", message, cut)
			require.Equal(t, LSN(42), decodeErr.LSN)
		}
		_, err := d.Decode(42, append(bytes.Clone(message), 0))
		require.ErrorAs(t, err, &decodeErr)
		require.Contains(t, decodeErr.Problem, "1 bytes too many")
		_, err = d.Decode(42, message)
		require.NoError(t, err)
	}
}

func TestDecodeErrors(t *testing.T) {
	t.Parallel()
	relation := &Relation{OID: 5, Schema: "s", Name: "r", Identity: 'd', Columns: []Column{{Name: "a"}, {Name: "b"}}}
	row := Tuple{{Kind: Null}, {Kind: Text, Data: []byte("x")}}
	tests := map[string]struct {
		message []byte
		problem string
	}{
		"nothing":                       {nil, "is empty"},
		"a kind of two-phase commit":    {[]byte{'b', 1, 2}, "is of an unknown kind"},
		"a kind of streaming":           {[]byte{'S', 0, 0, 0, 1, 1}, "is of an unknown kind"},
		"an unknown relation":           {encode(&Insert{Relation: &Relation{OID: 6}, New: row}), "relation 6, which was not described"},
		"a truncated unknown relation":  {encode(&Truncate{Relations: []*Relation{{OID: 6}}}), "relation 6, which was not described"},
		"a value too few":               {encode(&Insert{Relation: relation, New: row[:1]}), "1 values for the 2 columns of s.r"},
		"an unknown value":              {encode(&Insert{Relation: relation, New: Tuple{{Kind: 'x'}, {Kind: Null}}}), "unknown kind 'x'"},
		"an insert with an old tuple":   {output{'I'}.uint32(5).tuple('O', row), "a tuple 'O'"},
		"a delete with a new tuple":     {output{'D'}.uint32(5).tuple('N', row), "a tuple 'N'"},
		"an update with two old tuples": {output{'U'}.uint32(5).tuple('K', row).tuple('O', row), "a tuple 'O'"},
		"an update without a new tuple": {output{'U'}.uint32(5).tuple('K', row), "a tuple '\\x00'"},
		"a commit with flags":           {append([]byte{'C', 4}, make([]byte, 24)...), "unknown flags 0x4"},
		"a truncate with flags":         {append(output{'T'}.uint32(0), 4), "unknown flags 0x4"},
		"a message with flags":          {output{'M', 2}.uint64(1).text("").uint32(0), "unknown flags 0x2"},
		"a column with flags":           {append(output{'R'}.uint32(9).text("").text(""), 'd').uint16(1), "is too short"},
		"an endless value":              {append(output{'I'}.uint32(5), 'N', 0, 2, 'n', 'b', 0xff, 0xff, 0xff, 0xff), "is too short"},
		"endlessly many relations":      {append(output{'T'}.uint32(1<<32-1), 0), "is too short"},
		"endlessly many columns":        {append(output{'R'}.uint32(9).text("").text(""), 'd', 0xff, 0xff), "is too short"},
		"an endless message":            {output{'M', 0}.uint64(1).text("").uint32(1<<32 - 1), "is too short"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var d Decoder
			_, err := d.Decode(1, encode(relation))
			require.NoError(t, err)
			_, err = d.Decode(0x1_00000002, test.message)
			var decodeErr *DecodeError
			require.ErrorAs(t, err, &decodeErr)
			require.Equal(t, LSN(0x1_00000002), decodeErr.LSN)
			require.ErrorContains(t, err, test.problem)
			require.ErrorContains(t, err, "at 1/2")
			require.False(t, IsRetryable(err))
			_, err = d.Decode(3, encode(&Insert{Relation: relation, New: row}))
			require.NoError(t, err, "the relation is known still")
		})
	}
}

// A length field that promises more than there is must not be believed.
func TestDecodeAllocatesNothingAbsurd(t *testing.T) {
	var d Decoder
	relation := &Relation{OID: 5, Name: "r", Columns: []Column{{Name: "a"}}}
	_, err := d.Decode(1, encode(relation))
	require.NoError(t, err)
	for _, message := range [][]byte{
		append(output{'T'}.uint32(1<<32-1), 0),
		append(output{'R'}.uint32(9).text("").text(""), 'd', 0xff, 0xff),
		append(output{'I'}.uint32(5), 'N', 0, 1, 'b', 0xff, 0xff, 0xff, 0xff),
		output{'M', 0}.uint64(1).text("").uint32(1<<32 - 1),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range 100 {
			_, _ = d.Decode(1, message)
		}
		runtime.ReadMemStats(&after)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(100_000), "%q", message)
	}
}

// The changes of a known relation are decoded without any allocation.
func TestDecodeAllocations(t *testing.T) {
	relation := &Relation{OID: 5, Name: "r", Columns: []Column{{Name: "a"}, {Name: "b"}}}
	row := Tuple{{Kind: Binary, Data: make([]byte, 100)}, {Kind: Unchanged}}
	messages := [][]byte{
		encode(&Begin{}), encode(&Commit{}), encode(&Insert{Relation: relation, New: row}),
		encode(&Update{Relation: relation, OldKind: OldRow, Old: row, New: row}),
		encode(&Delete{Relation: relation, OldKind: OldKey, Old: row}),
		encode(&Truncate{Relations: []*Relation{relation}}),
		encode(&Message{Prefix: "prefix", Content: make([]byte, 100)}),
	}
	var d Decoder
	_, err := d.Decode(1, encode(relation))
	require.NoError(t, err)
	allocs := testing.AllocsPerRun(100, func() {
		for _, message := range messages {
			if _, err := d.Decode(1, message); err != nil {
				t.Error(err)
			}
		}
	})
	require.Zero(t, allocs)
}

// An event is good until the next; its clone, for ever.
func TestClone(t *testing.T) {
	t.Parallel()
	r := &random{Rand: rand.New(rand.NewPCG(3, 4))}
	var d Decoder
	var want, clones []Event
	for range 500 {
		event := r.event()
		message := encode(event)
		got, err := d.Decode(lsnOf(event), message)
		require.NoError(t, err)
		want, clones = append(want, event), append(clones, got.Clone())
		for i := range message {
			message[i] = 0xee // the buffer is used again
		}
	}
	require.Equal(t, want, clones)

	tuple := Tuple{{Kind: Text, Data: []byte("ab")}, {Kind: Text, Data: []byte("cd")}, {Kind: Null}, {Kind: Text, Data: []byte{}}}
	cloned := tuple.Clone()
	require.Equal(t, tuple, cloned)
	_ = append(cloned[0].Data, 'x')
	require.Equal(t, "cd", string(cloned[1].Data), "an append does not run into the next value")
	require.Nil(t, Tuple(nil).Clone())
}

func TestRelationColumn(t *testing.T) {
	t.Parallel()
	relation := &Relation{Columns: []Column{{Name: "a"}, {Name: "b"}}}
	require.Equal(t, 1, relation.Column("b"))
	require.Equal(t, -1, relation.Column("c"))
}

// FuzzDecode decodes a whole stream: messages, each with its length in two bytes
// before it. What is decoded must say the same when it is encoded again, and
// what pglogrepl makes of it must be the same, where that does not panic.
func FuzzDecode(f *testing.F) {
	for _, name := range []string{"text.hex", "binary.hex"} {
		// Large values are no more interesting than small ones, and slow.
		f.Add(joinMessages(slices.DeleteFunc(recorded(f, name), func(message []byte) bool { return len(message) > 500 })))
	}
	r := &random{Rand: rand.New(rand.NewPCG(5, 6))}
	for range 20 {
		var messages [][]byte
		for range 10 {
			messages = append(messages, encode(r.event()))
		}
		f.Add(joinMessages(messages))
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		var d Decoder
		for _, message := range splitMessages(stream) {
			before := bytes.Clone(message)
			event, err := d.Decode(9, message)
			require.Equal(t, before, message, "the decoder only reads")
			if err != nil {
				var decodeErr *DecodeError
				require.ErrorAs(t, err, &decodeErr)
				require.Equal(t, LSN(9), decodeErr.LSN)
				require.Nil(t, event)
				return
			}
			require.Equal(t, message, encode(event))
			require.Equal(t, message, encode(event.Clone()))
			compareWithPglogrepl(t, event, message)
		}
	})
}

// compareWithPglogrepl decodes a message that is known to be good by another
// decoder.
func compareWithPglogrepl(t *testing.T, event Event, message []byte) {
	t.Helper()
	other, err := pglogrepl.Parse(message)
	if err != nil && len(message) < 20 {
		return // it finds an insert into a table without columns too short
	}
	require.NoError(t, err)
	switch want := other.(type) {
	case *pglogrepl.BeginMessage:
		got := event.(*Begin)
		require.Equal(t, want.FinalLSN, pglogrepl.LSN(got.FinalLSN))
		require.Equal(t, want.Xid, got.XID)
		// It reckons in nanoseconds, which do not reach far.
		if y := got.CommitTime.Year(); y > 1700 && y < 2200 {
			require.True(t, want.CommitTime.Equal(got.CommitTime))
		}
	case *pglogrepl.CommitMessage:
		got := event.(*Commit)
		require.Equal(t, want.CommitLSN, pglogrepl.LSN(got.CommitLSN))
		require.Equal(t, want.TransactionEndLSN, pglogrepl.LSN(got.EndLSN))
	case *pglogrepl.InsertMessage:
		got := event.(*Insert)
		require.Equal(t, want.RelationID, got.Relation.OID)
		requireSameTuple(t, want.Tuple, got.New)
	case *pglogrepl.UpdateMessage:
		got := event.(*Update)
		require.Equal(t, want.OldTupleType, byte(got.OldKind))
		requireSameTuple(t, want.OldTuple, got.Old)
		requireSameTuple(t, want.NewTuple, got.New)
	case *pglogrepl.DeleteMessage:
		got := event.(*Delete)
		require.Equal(t, want.OldTupleType, byte(got.OldKind))
		requireSameTuple(t, want.OldTuple, got.Old)
	case *pglogrepl.RelationMessage:
		got := event.(*Relation)
		require.Equal(t, want.RelationID, got.OID)
		require.Equal(t, want.Namespace, got.Schema)
		require.Equal(t, want.RelationName, got.Name)
		require.Equal(t, want.ReplicaIdentity, got.Identity)
		require.Len(t, got.Columns, len(want.Columns))
		for i, column := range want.Columns {
			require.Equal(t, Column{column.Name, column.Flags == 1, column.DataType, column.TypeModifier}, got.Columns[i])
		}
	case *pglogrepl.LogicalDecodingMessage:
		got := event.(*Message)
		require.Equal(t, want.Prefix, got.Prefix)
		require.Equal(t, want.Transactional, got.Transactional)
		require.Equal(t, want.LSN, pglogrepl.LSN(got.LSN))
		require.True(t, bytes.Equal(want.Content, got.Content))
	}
}

func requireSameTuple(t *testing.T, want *pglogrepl.TupleData, got Tuple) {
	t.Helper()
	if want == nil {
		require.Nil(t, got)
		return
	}
	require.Len(t, got, len(want.Columns))
	for i, column := range want.Columns {
		require.Equal(t, column.DataType, byte(got[i].Kind))
		require.True(t, bytes.Equal(column.Data, got[i].Data))
	}
}

func joinMessages(messages [][]byte) []byte {
	var stream output
	for _, message := range messages {
		stream = append(stream.uint16(uint16(len(message))), message...)
	}
	return stream
}

func splitMessages(stream []byte) [][]byte {
	var messages [][]byte
	for len(stream) >= 2 {
		length := min(int(stream[0])<<8|int(stream[1]), len(stream)-2)
		messages = append(messages, stream[2:2+length])
		stream = stream[2+length:]
	}
	return messages
}

func BenchmarkDecode(b *testing.B) {
	relation := &Relation{OID: 5, Name: "r", Columns: make([]Column, 6)}
	row := make(Tuple, 6)
	for i := range row {
		row[i] = Value{Kind: Binary, Data: make([]byte, 20)}
	}
	messages := [][]byte{encode(&Begin{}), encode(&Insert{Relation: relation, New: row}), encode(&Commit{})}
	var d Decoder
	if _, err := d.Decode(1, encode(relation)); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		for _, message := range messages {
			if _, err := d.Decode(1, message); err != nil {
				b.Fatal(err)
			}
		}
	}
}
