package tests

import (
	"slices"
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// Field case F18, and the outcome that nobody can know. A retry layer elsewhere
// sent the messages again after it had emptied them.
func TestPublishAfterLostConnection(t *testing.T) {
	t.Parallel()

	for name, n := range callSizes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			proxy := pgtest.NewProxy(t, pgtest.Shared(t).Addr())
			publisher := publisherOn(t, pgtest.Pool(t, proxy.URL(f.url)), outbox.PublisherConfig{})
			messages := make([]*message.Message, n)
			for i := range messages {
				messages[i] = message.NewMessage(strconv.Itoa(i), []byte{0, byte(i)})
				messages[i].Metadata.Set("n", strconv.Itoa(i))
			}
			before := contents(messages)

			// Bind carries the values of an INSERT, CopyData those of a COPY.
			proxy.OnClient(func(m pgtest.Message) pgtest.Action {
				if m.Type == 'B' || m.Type == 'd' {
					return pgtest.Cut
				}
				return pgtest.Forward
			})
			require.Error(t, publisher.Publish("orders", messages...))
			require.Equal(t, before, contents(messages))
			require.Empty(t, f.stored(t, "orders"))

			proxy.OnClient(nil)
			require.NoError(t, publisher.Publish("orders", messages...))
			require.Equal(t, before, contents(messages))
			f.requireStored(t, "orders", messages)
		})
	}
}

// Field case F12, for the publisher. The connection dies after the server has
// committed and before the client hears of it. Nobody can tell this from a
// failure, so the error must not claim that it is safe to try again, and the
// library does not try again by itself. UUIDs are not unique: whoever publishes
// once more stores the message a second time, and it is up to the handlers to
// recognise it.
func TestPublishWithUnknownOutcome(t *testing.T) {
	t.Parallel()

	for name, n := range callSizes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			proxy := pgtest.NewProxy(t, pgtest.Shared(t).Addr())
			publisher := publisherOn(t, pgtest.Pool(t, proxy.URL(f.url)), outbox.PublisherConfig{})
			messages := newMessages(n)
			// Execute ends an INSERT, CopyDone a COPY.
			proxy.OnClient(func(m pgtest.Message) pgtest.Action {
				if m.Type == 'E' || m.Type == 'c' {
					return pgtest.LoseReply
				}
				return pgtest.Forward
			})
			err := publisher.Publish("orders", messages...)
			require.Error(t, err)
			require.False(t, pgconn.SafeToRetry(err))
			f.requireStored(t, "orders", messages)

			proxy.OnClient(nil)
			require.NoError(t, publisher.Publish("orders", messages...))
			f.requireStored(t, "orders", slices.Concat(messages, messages))
		})
	}
}

// The same with the caller's own COMMIT.
func TestCommitWithUnknownOutcome(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	proxy := pgtest.NewProxy(t, pgtest.Shared(t).Addr())
	pool := pgtest.Pool(t, proxy.URL(f.url))
	publisher := publisherOn(t, pool, outbox.PublisherConfig{RequireTx: true})
	msg := newMessages(1)
	proxy.OnClient(func(m pgtest.Message) pgtest.Action {
		if m.Type == 'Q' && string(m.Body) == "commit\x00" {
			return pgtest.LoseReply
		}
		return pgtest.Forward
	})
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", msg...))
	require.Error(t, tx.Commit(t.Context()))
	f.requireStored(t, "orders", msg)

	proxy.OnClient(nil)
	tx, err = pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", msg...))
	require.NoError(t, tx.Commit(t.Context()))
	f.requireStored(t, "orders", slices.Concat(msg, msg))
}
