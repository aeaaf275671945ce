package tests

import (
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/cursor"
)

// ensure makes the cursor of a topic that is not divided.
func (f *fixture) ensure(t testing.TB, store *cursor.Store, key cursor.Key) {
	t.Helper()
	_, err := store.Ensure(t.Context(), f.pool, key.Of(), nil, 1, false)
	require.NoError(t, err)
}

const badCursor = "Cannot use a stored position"

// A cursor's row that was edited, or copied from another server, cannot be a
// position. To go on from it would pass messages over in silence; the subscriber
// says what is wrong instead, as long as it is, and goes on when it is repaired.
// Field case F04.
func TestCursorThatIsNoPosition(t *testing.T) {
	t.Parallel()

	edits := map[string]struct {
		edit string
		says []string
	}{
		"from the future": {
			"p = ((pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 1000000)::text || ':' || " +
				"(pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 1000000)::text || ':')::pg_snapshot",
			[]string{"column p", "future"},
		},
		"window from the future": {
			"step = 'main', top = 1000, c = ((pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 1000000)::text || ':' || " +
				"(pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 1000000)::text || ':')::pg_snapshot",
			[]string{"column c", "future"},
		},
		"window before p":              {"step = 'main', c = '3:3:'", []string{"3:3:", "does not follow"}},
		"behind its window":            {"step = 'main', c = p, top = 5, at = 1000000", []string{"at 1000000"}},
		"late above its floor":         {"step = 'late', c = p, at = 1000000", []string{"at 1000000", "floor"}},
		"negative":                     {"floor = -1", []string{"floor -1"}},
		"holes that are no rows":       {`holes = '[1, "x"]'`, []string{"column holes"}},
		"holes without numbers":        {`holes = '[{"era": "x", "id": 1, "created_at": "2026-01-01T00:00:00Z"}]'`, []string{"column holes"}},
		"past without eras":            {`past = '{"x": {"p": "1:1:"}}'`, []string{"column past", `"x"`}},
		"past that is no position":     {`past = '{"17": {"p": "nonsense"}}'`, []string{"column past", "nonsense"}},
		"past with a window of nobody": {`past = '{"17": {"p": "1:1:", "c": "9:3:"}}'`, []string{"column past", "9:3:"}},
	}
	for name, e := range edits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			publisher := f.publisher(outbox.PublisherConfig{})
			sent := newMessages(5)
			require.NoError(t, publisher.Publish("topic", sent[:2]...))
			first, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
			requireNext(t, messages, sent[:2]...)
			require.NoError(t, first.Close())
			f.exec("CREATE TABLE backup AS SELECT p, floor, step, c, top, at, at_era, holes, past FROM outbox.cursors")
			require.NoError(t, publisher.Publish("topic", sent[2:4]...))
			f.exec("UPDATE outbox.cursors SET " + e.edit)

			consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
			_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			_, elsewhere := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "healthy"}, "topic")
			requireNext(t, elsewhere, sent[:4]...)
			for _, entry := range book.await(t, 2, badCursor) {
				require.Equal(t, "error", entry.Level)
				require.ErrorIs(t, entry.Err, cursor.ErrBadCursor)
				require.ErrorContains(t, entry.Err, `group "default", topic "topic"`)
				require.Equal(t, outbox.DefaultConsumerGroup, entry.Fields["consumer_group"])
				require.Equal(t, "topic", entry.Fields["topic"])
				for _, text := range e.says {
					require.ErrorContains(t, entry.Err, text)
				}
			}
			select {
			case msg := <-messages:
				require.FailNow(t, "delivered from a position that is none", "message %s", msg.UUID)
			default:
			}

			f.exec(`UPDATE outbox.cursors SET (p, floor, step, c, top, at, at_era, holes, past)
				= (SELECT p, floor, step, c, top, at, at_era, holes, past FROM backup) WHERE consumer_group = 'default'`)
			require.NoError(t, publisher.Publish("topic", sent[4]))
			requireNext(t, messages, sent[2:]...)
		})
	}
}

// Deleted, as the error advises, it begins anew with the next Subscribe.
func TestBadCursorIsDeleted(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := newMessages(3)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	require.NoError(t, subscriber.SubscribeInitialize("topic"))
	f.exec("UPDATE outbox.cursors SET floor = -1")
	messages, err := subscriber.Subscribe(t.Context(), "topic")
	require.NoError(t, err)
	book.await(t, 1, badCursor)
	require.NoError(t, subscriber.Close())
	requireClosed(t, messages)

	f.exec("DELETE FROM outbox.cursors")
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent...)
}

// A process that holds a cursor which it cannot use lets it go with the last
// subscription that wanted it. It lives on, so nobody else would ever get the
// cursor from it.
func TestBadCursorIsGivenUpWithItsSubscription(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := newMessages(3)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	require.NoError(t, subscriber.SubscribeInitialize("topic"))
	f.exec("UPDATE outbox.cursors SET floor = -1")
	_, err = subscriber.Subscribe(t.Context(), "topic")
	require.NoError(t, err)
	book.await(t, 1, badCursor)
	require.NoError(t, subscriber.Close())
	f.exec("UPDATE outbox.cursors SET floor = 0")

	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent...)
}
