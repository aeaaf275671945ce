package tests

import (
	"encoding/json"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// storedRow is a message as the table holds it.
type storedRow struct {
	ID       int64
	Key      *string
	UUID     string
	Metadata []byte
	Payload  []byte
}

// stored returns the messages of a topic in the order of their ids.
func (f *fixture) stored(t testing.TB, topic string) []storedRow {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), f.sql(`SELECT id, key, uuid, metadata::text, payload FROM outbox.messages
		WHERE topic = $1 ORDER BY id`), topic)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[storedRow])
	require.NoError(t, err)
	return list
}

// storedUUIDs is stored, reduced to what most tests compare.
func (f *fixture) storedUUIDs(t testing.TB, topic string) []string {
	t.Helper()
	list := []string{}
	for _, row := range f.stored(t, topic) {
		list = append(list, row.UUID)
	}
	return list
}

// requireStored fails unless the topic holds these messages, in this order, with
// every byte as it was sent. The check is made on the table and not on what is
// delivered, so that a mistake of the reader cannot hide one of the writer.
func (f *fixture) requireStored(t testing.TB, topic string, want []*message.Message) {
	t.Helper()
	rows := f.stored(t, topic)
	require.Len(t, rows, len(want))
	for i, row := range rows {
		require.Equal(t, want[i].UUID, row.UUID, "message %d", i)
		if want[i].Payload == nil {
			require.Nil(t, row.Payload, "message %d", i)
		} else {
			require.NotNil(t, row.Payload, "message %d", i)
			require.Equal(t, []byte(want[i].Payload), row.Payload, "message %d", i)
		}
		var metadata message.Metadata
		require.NoError(t, json.Unmarshal(row.Metadata, &metadata), "message %d", i)
		if len(want[i].Metadata) == 0 {
			require.Empty(t, metadata, "message %d", i)
		} else {
			require.Equal(t, want[i].Metadata, metadata, "message %d", i)
		}
	}
}

// requireDelivered fails unless these messages come next, in this order, with
// every byte as it was sent, and acks them.
func requireDelivered(t testing.TB, messages <-chan *message.Message, want []*message.Message) {
	t.Helper()
	for i, got := range receive(t, messages, len(want)) {
		require.Equal(t, want[i].UUID, got.UUID, "message %d", i)
		// nil and no bytes are told apart here.
		require.Equal(t, want[i].Payload, got.Payload, "message %d", i)
		require.NotNil(t, got.Metadata, "message %d: handlers call Metadata.Set", i)
		if len(want[i].Metadata) == 0 {
			require.Empty(t, got.Metadata, "message %d", i)
		} else {
			require.Equal(t, want[i].Metadata, got.Metadata, "message %d", i)
		}
	}
}

// Sizes of a Publish call that take different ways into the table: a plain
// INSERT, one with arrays, and COPY.
var callSizes = map[string]int{"one": 1, "few": 5, "many": 100}
