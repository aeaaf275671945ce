package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// TestCausalDelivery lets random concurrent transactions meet a reader that is
// closed and opened again at random points, with random page sizes: nothing may
// be lost, repeated (every end is a clean one) or out of causal order. Set
// OUTBOX_TEST_SECONDS for a longer run, OUTBOX_TEST_SEED to repeat one.
//
// With the WAL, the stream is killed and the publication touched at random, and
// the reader is slow now and then, so that its buffer is full: it goes back to
// the table and returns many times. Field cases F22, F25 and F29 are about
// positions that this way of reading does not have.
func TestCausalDelivery(t *testing.T) {
	t.Parallel()

	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			// A server of its own: a slot waits for everybody's transactions.
			f, _ := newOwnFixture(t, pgtest.Options{})
			testCausalDelivery(t, f, mode)
		})
	}
}

func testCausalDelivery(t *testing.T, f *fixture, mode outbox.Mode) {
	const writers, topic = 12, "changes"
	w := newWorkload(t, f, topic, 20, writers)
	w.also = []string{topic + ".too"}
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.PollInterval, c.Mode, c.LiveBytes = 3*time.Millisecond, mode, outbox.MinLiveBytes
	})
	seed := uint64(number("OUTBOX_TEST_SEED", int(time.Now().UnixNano())))
	duration := time.Duration(number("OUTBOX_TEST_SECONDS", 5)) * time.Second

	writing, cancel := context.WithTimeout(t.Context(), duration)
	defer cancel()
	var l, steady ledger
	many := newLedgers(w)
	// Another group has the same rows from the same stream, without a restart.
	_, others := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "steady"}, topic)
	go func() {
		for msg := range others {
			steady.record(t, msg)
			msg.Ack()
		}
	}()
	restarts, restartsOfMany := make(chan int, 1), make(chan int, 1)
	written := make(chan struct{})
	stop := make(chan struct{})
	go func() {
		defer close(written)
		w.run(t, writing, writers, seed)
	}()
	var disturbing sync.WaitGroup
	if mode != outbox.ModePoll {
		disturbing.Go(func() { disturbStream(t, writing, f, seed) })
	}
	reader := restartedReader{t: t, consumer: consumer, written: written, stop: stop}
	go func() {
		random := rand.New(rand.NewPCG(seed, 1000))
		restarts <- readWithRestarts(reader, random, outbox.SubscriberConfig{},
			func(s *outbox.Subscriber) (<-chan *message.Message, error) {
				return s.Subscribe(context.Background(), topic)
			},
			func(msg *message.Message, slow func()) {
				l.record(t, msg)
				slow()
				msg.Ack()
			})
	}()
	// A third reads many topics by one cursor.
	go func() {
		random := rand.New(rand.NewPCG(seed, 3000))
		restartsOfMany <- readWithRestarts(reader, random, outbox.SubscriberConfig{ConsumerGroup: "many", Ordering: outbox.OrderingByKey},
			func(s *outbox.Subscriber) (<-chan []*message.Message, error) {
				return s.SubscribeBatches(context.Background(), outbox.MatchTopics(topic+"*"), 1+random.IntN(20))
			},
			func(batch []*message.Message, slow func()) {
				for _, msg := range batch {
					many.record(t, msg)
					slow()
					msg.Ack()
				}
			})
	}()
	<-written
	disturbing.Wait()
	w.settled(t, &l)
	w.settled(t, &steady)
	many.settled(t, w)
	close(stop)
	n, m := <-restarts, <-restartsOfMany

	attached, detached := len(book.find("Topic is read from the WAL")), len(book.find("Topic is polled"))
	t.Logf("mode=%s seed=%d restarts=%d+%d streams=%d attached=%d detached=%d",
		mode, seed, n, m, len(book.find("Messages are read from the WAL")), attached, detached)
	if mode != outbox.ModePoll {
		require.Positive(t, attached, "never live")
		require.Positive(t, detached, "live all the time")
	}
	for group, ledger := range map[string]*ledger{"restarted": &l, "steady": &steady} {
		v := w.judge(t, ledger)
		t.Logf("mode=%s group=%s %s", mode, group, v)
		require.Positive(t, v.Committed)
		require.Zero(t, v.Lost, "lost")
		require.Zero(t, v.Invented, "invented")
		require.Zero(t, v.Duplicated, "duplicated")
		require.Zero(t, v.OutOfOrder, "out of order")
	}
	many.requireOnceInOrder(t, w, fmt.Sprintf("mode=%s group=many", mode))
}

// disturbStream kills the stream, or touches the publication, at random.
func disturbStream(t *testing.T, ctx context.Context, f *fixture, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 2000))
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(1000+random.IntN(2000)) * time.Millisecond):
		}
		statement := `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name LIKE 'watermill_outbox_%'`
		if random.IntN(4) == 0 {
			statement = "ALTER PUBLICATION " + quoteIdentifier(oddSchema) + " SET (publish = 'insert')"
		}
		if _, err := f.pool.Exec(context.WithoutCancel(ctx), statement); err != nil {
			t.Error(err)
		}
	}
}

// restartedReader is what all readers have that are restarted.
type restartedReader struct {
	t        *testing.T
	consumer *outbox.Consumer
	// written is closed when the writing is over, stop when the reading is to be.
	written, stop <-chan struct{}
}

// readWithRestarts subscribes, receives for a while, closes, and begins again,
// until stop; after the writing is over it stays with one subscription. What comes
// is handled by handle, which calls slow for each message.
func readWithRestarts[T any](r restartedReader, random *rand.Rand, config outbox.SubscriberConfig, subscribe func(*outbox.Subscriber) (<-chan T, error), handle func(T, func())) int {
	slow := func() {
		if random.IntN(400) == 0 {
			time.Sleep(time.Second) // a handler that is slow now and then
		}
	}
	for restarts := 0; ; restarts++ {
		config.PageSize = 1 + random.IntN(100)
		subscriber, err := outbox.NewSubscriber(r.consumer, config, nil)
		if err != nil {
			r.t.Error(err)
			return restarts
		}
		incoming, err := subscribe(subscriber)
		if err != nil {
			r.t.Error(err)
			return restarts
		}
		var end <-chan time.Time
		select {
		case <-r.written:
		default:
			end = time.After(time.Duration(random.IntN(2500)) * time.Millisecond)
		}
		over := false
		for receiving := true; receiving; {
			select {
			case next := <-incoming:
				handle(next, slow)
			case <-end:
				receiving = false
			case <-r.stop:
				receiving, over = false, true
			}
		}
		if err := subscriber.Close(); err != nil {
			r.t.Error(err)
		}
		if over {
			return restarts
		}
	}
}

// number reads a number from the environment.
func number(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}
