package live

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/replication"
)

// tupleWith is a tuple of logRelation in which some columns are others.
func tupleWith(change map[int]replication.Value) replication.Tuple {
	tuple := replication.Tuple{
		columnID: bigint(42), columnXID: bigint(1<<33 + 5), columnEra: bigint(-7), columnTopic: binaryValue([]byte("topic")),
		columnKey: binaryValue([]byte("key")), columnUUID: binaryValue([]byte("uuid")), columnMetadata: binaryValue([]byte(`{"a":"ü"}`)),
		columnPayload: binaryValue([]byte{0, 1, 0xff}), columnCreatedAt: bigint(1_500_000), columnTargetGroup: binaryValue([]byte("group")),
		columnAttempt: integer32(3),
	}
	for column, value := range change {
		tuple[column] = value
	}
	return tuple
}

// Every column, in each format that it can come in, and NULL where it can be.
func TestDecodeRow(t *testing.T) {
	t.Parallel()

	full := window.Row{
		ID: 42, XID: 1<<33 + 5, Era: -7, Key: "key", UUID: "uuid", Metadata: []byte(`{"a":"ü"}`), Payload: []byte{0, 1, 0xff},
		CreatedAt: time.Date(2000, 1, 1, 0, 0, 1, 500_000_000, time.UTC), Attempt: 3,
	}
	for name, test := range map[string]struct {
		change map[int]replication.Value
		want   func(row *window.Row, group *string)
	}{
		"binary": {nil, func(*window.Row, *string) {}},
		"text": {map[int]replication.Value{
			columnID: textValue("42"), columnXID: textValue("8589934597"), columnEra: textValue("-7"), columnTopic: textValue("topic"),
			columnKey: textValue("key"), columnUUID: textValue("uuid"), columnMetadata: textValue(`{"a":"ü"}`),
			columnTargetGroup: textValue("group"), columnAttempt: textValue("3"),
		}, func(*window.Row, *string) {}},
		"no key": {map[int]replication.Value{columnKey: nullValue}, func(row *window.Row, _ *string) { row.Key = "" }},
		"no payload": {
			map[int]replication.Value{columnPayload: nullValue},
			func(row *window.Row, _ *string) { row.Payload = nil },
		},
		"an empty payload is none of those": {
			map[int]replication.Value{columnPayload: binaryValue([]byte{})},
			func(row *window.Row, _ *string) { row.Payload = []byte{} },
		},
		"for all groups": {
			map[int]replication.Value{columnTargetGroup: nullValue},
			func(_ *window.Row, group *string) { *group = "" },
		},
		"before 2000": {
			map[int]replication.Value{columnCreatedAt: bigint(-1_000_000)},
			func(row *window.Row, _ *string) { row.CreatedAt = time.Date(1999, 12, 31, 23, 59, 59, 0, time.UTC) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			want, wantGroup := full, "group"
			test.want(&want, &wantGroup)
			log, err := newTable(logRelation)
			require.NoError(t, err)
			tuple := tupleWith(test.change).Clone()
			got, group, err := log.row(tuple)
			require.NoError(t, err)
			// The stream uses its bytes again.
			for _, value := range tuple {
				for i := range value.Data {
					value.Data[i] = 'x'
				}
			}
			require.True(t, want.CreatedAt.Equal(got.CreatedAt), "%s", got.CreatedAt)
			want.CreatedAt = got.CreatedAt
			require.Equal(t, want, got)
			require.Equal(t, wantGroup, group)
			// Nor do the two share more than an array.
			_ = append(got.Metadata, 'x')
			require.Equal(t, want.Payload, got.Payload)
		})
	}
}

// The columns are found by name, wherever they are: tables that were upgraded
// have them in another order than new ones, and later versions have more.
func TestDecodeFindsColumnsByName(t *testing.T) {
	t.Parallel()

	relation := logRelation.Clone().(*replication.Relation)
	shuffled := &replication.Relation{OID: 2, Schema: relation.Schema, Name: relation.Name}
	var tuple replication.Tuple
	for i, value := range slices.Backward(tupleWith(nil)) {
		shuffled.Columns = append(shuffled.Columns, relation.Columns[i], replication.Column{Name: "later_" + relation.Columns[i].Name})
		tuple = append(tuple, value, textValue("?"))
	}
	log, err := newTable(shuffled)
	require.NoError(t, err)
	got, group, err := log.row(tuple)
	require.NoError(t, err)
	first, err := newTable(relation)
	require.NoError(t, err)
	want, wantGroup, err := first.row(tupleWith(nil))
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Equal(t, wantGroup, group)
}

// A row that cannot be read ends the stream, with its place in the log and its
// column, instead of being delivered wrong or left out.
func TestUnreadableRowIsAnErrorWithItsPlace(t *testing.T) {
	t.Parallel()

	receive := func(t *testing.T, insert *replication.Insert) error {
		r := newRig(t, testBytes, "topic")
		r.begin(1001)
		insert.LSN = 0xabc0012345678
		return r.session.receive(insert)
	}
	for name, test := range map[string]struct {
		column int
		value  replication.Value
		says   string
	}{
		"no id":                 {columnID, nullValue, "column id: a number comes as 'n' of 0 bytes"},
		"half an id":            {columnID, binaryValue([]byte{1, 2, 3}), "column id: a number comes as 'b' of 3 bytes"},
		"an odd id":             {columnID, textValue("4x"), `column id: strconv.ParseInt: parsing "4x"`},
		"no transaction":        {columnXID, nullValue, "column xid: "},
		"no era":                {columnEra, nullValue, "column era: "},
		"no attempt":            {columnAttempt, nullValue, "column attempt: "},
		"no time":               {columnCreatedAt, nullValue, "column created_at: a time comes as 'n'"},
		"a time in some format": {columnCreatedAt, textValue("2000-01-01 00:00:01"), "column created_at: a time comes as 't'"},
		"half a time":           {columnCreatedAt, binaryValue([]byte{1}), "column created_at: a number comes as 'b' of 1 bytes"},
		"an escaped payload":    {columnPayload, textValue(`\x00`), "column payload comes as text"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			tuple := tupleWith(map[int]replication.Value{columnEra: bigint(7), columnXID: bigint(1001)})
			tuple[test.column] = test.value
			err := receive(t, &replication.Insert{Relation: logRelation, New: tuple})
			require.ErrorContains(t, err, "insert at ABC00/12345678: "+test.says)
		})
	}

	err := receive(t, &replication.Insert{Relation: logRelation, New: tupleWith(nil)[1:]})
	require.ErrorContains(t, err, "insert at ABC00/12345678: 10 values for 11 columns")
	for i, name := range columnNames {
		without := &replication.Relation{
			Schema: "outbox", Name: "messages",
			Columns: slices.Delete(slices.Clone(logRelation.Columns), i, i+1),
		}
		err := receive(t, &replication.Insert{Relation: without, New: tupleWith(nil)[1:]})
		require.ErrorContains(t, err, `insert at ABC00/12345678: table "outbox"."messages" comes without column `+name)
	}
}

// Somebody adds a table to the publication, or one of the same name in another
// schema. Theirs is not ours, and may look in any way.
func TestOtherTablesOfThePublicationAreLeftOut(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	buffer := r.attach("topic", "group")
	r.begin(1001)
	for _, relation := range []*replication.Relation{
		{Schema: "outbox", Name: "cursors"}, {Schema: "public", Name: "messages"}, {Schema: "", Name: "messages"},
	} {
		r.receive(&replication.Insert{Relation: relation})
	}
	r.insert(1001, stored{id: 1, topic: "topic"})
	// Described again, as after it was altered.
	again := *logRelation
	insert := insertOf(1001, stored{id: 2, topic: "topic"})
	insert.Relation = &again
	r.receive(insert)
	r.commit(0)
	r.step()
	ids, _ := takeAll(buffer)
	require.Equal(t, []int64{1, 2}, ids)
}

func FuzzDecodeNumber(f *testing.F) {
	f.Add(byte('b'), []byte{0, 0, 0, 1})
	f.Add(byte('t'), []byte("12"))
	f.Add(byte('n'), []byte(nil))
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		before := bytes.Clone(data)
		value := replication.Value{Kind: replication.ValueKind(kind), Data: data}
		n, err := integer(value)
		if err == nil && kind == byte(replication.Binary) && len(data) == 8 {
			require.Equal(t, bigint(n).Data, data)
		}
		if err == nil && kind == byte(replication.Binary) && len(data) == 4 {
			require.Equal(t, integer32(int32(n)).Data, data)
		}
		_, _ = microseconds(value) // must not panic
		require.Equal(t, before, data)
	})
}
