package tests

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

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
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.PollInterval, c.Mode, c.LiveBytes = 3*time.Millisecond, mode, outbox.MinLiveBytes
	})
	seed := uint64(number("OUTBOX_TEST_SEED", int(time.Now().UnixNano())))
	duration := time.Duration(number("OUTBOX_TEST_SECONDS", 8)) * time.Second

	writing, cancel := context.WithTimeout(t.Context(), duration)
	defer cancel()
	var l, steady ledger
	// Another group has the same rows from the same stream, without a restart.
	_, others := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "steady"}, topic)
	go func() {
		for msg := range others {
			steady.record(t, msg)
			msg.Ack()
		}
	}()
	restarts := make(chan int, 1)
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
	go func() { restarts <- readWithRestarts(t, f, consumer, topic, &l, written, stop, seed) }()
	<-written
	disturbing.Wait()
	w.settled(t, &l)
	w.settled(t, &steady)
	close(stop)
	n := <-restarts

	attached, detached := len(book.find("Topic is read from the WAL")), len(book.find("Topic is polled"))
	t.Logf("mode=%s seed=%d restarts=%d streams=%d attached=%d detached=%d",
		mode, seed, n, len(book.find("Messages are read from the WAL")), attached, detached)
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

// readWithRestarts subscribes, receives for a while, closes, and begins again,
// until stop; after the writing is over it stays with one subscription.
func readWithRestarts(t *testing.T, f *fixture, consumer *outbox.Consumer, topic string, l *ledger, written, stop <-chan struct{}, seed uint64) int {
	random := rand.New(rand.NewPCG(seed, 1000))
	for restarts := 0; ; restarts++ {
		subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{PageSize: 1 + random.IntN(100)}, nil)
		if err != nil {
			t.Error(err)
			return restarts
		}
		messages, err := subscriber.Subscribe(context.Background(), topic)
		if err != nil {
			t.Error(err)
			return restarts
		}
		var end <-chan time.Time
		select {
		case <-written:
		default:
			end = time.After(time.Duration(random.IntN(2500)) * time.Millisecond)
		}
		over := false
		for receiving := true; receiving; {
			select {
			case msg := <-messages:
				l.record(t, msg)
				if random.IntN(400) == 0 {
					time.Sleep(time.Second) // a handler that is slow now and then
				}
				msg.Ack()
			case <-end:
				receiving = false
			case <-stop:
				receiving, over = false, true
			}
		}
		if err := subscriber.Close(); err != nil {
			t.Error(err)
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
