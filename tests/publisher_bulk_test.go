package tests

import (
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// The size of the messages chooses the way as well: a few large ones go by COPY.
func TestPublishFewLargeMessages(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := []*message.Message{
		message.NewMessage("a", make([]byte, 600<<10)),
		message.NewMessage("b", nil),
		message.NewMessage("c", make([]byte, 600<<10)),
	}
	sent[0].Payload[0], sent[2].Payload[600<<10-1] = 1, 2
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", sent...))
	f.requireStored(t, "orders", sent)
}

// Field case F84. The protocol counts parameters in 16 bits, so a statement
// that grows with the messages fails somewhere above ten thousand of them, at
// the busiest moment.
func TestPublishManyMessagesInOneCall(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		n    int
		open func(t *testing.T, f *fixture) (db any, commit func() error)
	}{
		"pool": {100_000, func(t *testing.T, f *fixture) (any, func() error) {
			return f.pool, func() error { return nil }
		}},
		"transaction": {100_000, func(t *testing.T, f *fixture) (any, func() error) {
			tx, err := f.connect(t).Begin(t.Context())
			require.NoError(t, err)
			return tx, func() error { return tx.Commit(t.Context()) }
		}},
		"database/sql": {70_000, func(t *testing.T, f *fixture) (any, func() error) {
			return openSQL(t, "postgres", f.url), func() error { return nil }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			db, commit := test.open(t, f)
			publisher := publisherOn(t, db, outbox.PublisherConfig{})
			sent := make([]*message.Message, test.n)
			for i := range sent {
				sent[i] = message.NewMessage(strconv.Itoa(i), []byte(strconv.Itoa(i)))
			}

			sent[40_000].UUID = "\xff"
			err := publisher.Publish("orders", sent...)
			var invalid *outbox.MessageError
			require.ErrorAs(t, err, &invalid)
			require.Equal(t, 40_000, invalid.Index)
			require.Empty(t, f.stored(t, "orders"))

			sent[40_000].UUID = "40000"
			require.NoError(t, publisher.Publish("orders", sent...))
			require.NoError(t, commit())
			require.Equal(t, uuids(sent), f.storedUUIDs(t, "orders"))
		})
	}
}

// A call without a transaction is all or nothing, also when it is the server
// that refuses a message in the middle of it.
func TestPublishWithoutTransactionIsAtomic(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("ALTER TABLE outbox.messages ADD CONSTRAINT refused CHECK (uuid <> 'refused')")
	for kind, db := range map[string]any{"pgx": f.pool, "database/sql": openSQL(t, "postgres", f.url)} {
		publisher := publisherOn(t, db, outbox.PublisherConfig{})
		for name, n := range callSizes {
			messages := newMessages(n)
			messages[n-1].UUID = "refused"
			require.ErrorContains(t, publisher.Publish("orders", messages...), "refused", "%s, %s", kind, name)
			require.Empty(t, f.stored(t, "orders"), "%s, %s", kind, name)
		}
	}
}
