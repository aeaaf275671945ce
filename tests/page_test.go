package tests

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// rowCounter counts the rows that statements on messages return.
type rowCounter struct{ n atomic.Int64 }

type rowCounterKey struct{}

func (c *rowCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, rowCounterKey{}, strings.Contains(data.SQL, "m.payload"))
}

func (c *rowCounter) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if reads, _ := ctx.Value(rowCounterKey{}).(bool); reads {
		c.n.Add(max(data.CommandTag.RowsAffected()-1, 0)) // without the header
	}
}

// A worker that takes whatever is waiting into its memory ends with a backlog of
// any size. Strict order has one message in flight, and read are what was taken in,
// a page at most, the rest of the page that comes from, and the next, whether a
// page is full by rows or by bytes. Field case F99.
func TestReadsTwoPagesAhead(t *testing.T) {
	t.Parallel()

	const total = 500
	f := newFixture(t)
	sent := newMessages(total)
	for _, msg := range sent {
		msg.Payload = append(msg.Payload, make([]byte, 1000)...)
	}
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	for name, config := range map[string]outbox.SubscriberConfig{
		"by rows": {PageSize: 10}, "by bytes": {PageBytes: 9_000}, // of a bit more than 1100 each
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			const page = 10
			rows := &rowCounter{}
			db := f.pool.Config()
			db.ConnConfig.Tracer = rows
			config.ConsumerGroup = name
			consumer := f.consumerOn(db, nil)
			_, messages := f.subscribe(consumer, config, "topic")
			for i := range 40 {
				msg := nextMessage(t, messages)
				require.Equal(t, sent[i].UUID, msg.UUID)
				// The next page comes while nothing is acked, so it is awaited; a
				// fourth one would have to wait.
				require.Eventually(t, func() bool { return rows.n.Load() > int64(i+1) }, waitFor, waitFor/10_000)
				require.LessOrEqual(t, rows.n.Load(), int64(i+3*page), "message %d", i)
				select {
				case other := <-messages:
					require.FailNow(t, "a second message is in flight", "%s beside %s", other.UUID, msg.UUID)
				default:
				}
				require.True(t, msg.Ack())
			}
			requireNext(t, messages, sent[40:]...)
			require.Equal(t, int64(total), rows.n.Load(), "rows were read twice")
		})
	}
}
