package tests

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// TestCausalDelivery lets random concurrent transactions meet a reader that is
// closed and opened again at random points, with random page sizes: nothing may
// be lost, repeated (every end is a clean one) or out of causal order. Set
// OUTBOX_TEST_SECONDS for a longer run, OUTBOX_TEST_SEED to repeat one.
func TestCausalDelivery(t *testing.T) {
	t.Parallel()

	const writers, topic = 12, "changes"
	f := newFixture(t)
	w := newWorkload(t, f, topic, 20, writers)
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.PollInterval = 3 * time.Millisecond })
	seed := uint64(number("OUTBOX_TEST_SEED", int(time.Now().UnixNano())))
	duration := time.Duration(number("OUTBOX_TEST_SECONDS", 6)) * time.Second

	writing, cancel := context.WithTimeout(t.Context(), duration)
	defer cancel()
	var l ledger
	restarts := make(chan int, 1)
	written := make(chan struct{})
	stop := make(chan struct{})
	go func() {
		defer close(written)
		w.run(t, writing, writers, seed)
	}()
	go func() { restarts <- readWithRestarts(t, f, consumer, topic, &l, written, stop, seed) }()
	<-written
	w.settled(t, &l)
	close(stop)
	n := <-restarts

	v := w.judge(t, &l)
	t.Logf("seed=%d restarts=%d %s", seed, n, v)
	require.Positive(t, v.Committed)
	require.Zero(t, v.Lost, "lost")
	require.Zero(t, v.Invented, "invented")
	require.Zero(t, v.Duplicated, "duplicated")
	require.Zero(t, v.OutOfOrder, "out of order")
}

// readWithRestarts subscribes, receives for a while, closes, and begins again,
// until stop; after the writing is over it stays with one subscription.
func readWithRestarts(t *testing.T, f *fixture, consumer *outbox.Consumer, topic string, l *ledger, written, stop <-chan struct{}, seed uint64) int {
	random := rand.New(rand.NewPCG(seed, 1000))
	for restarts := 0; ; restarts++ {
		subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{PageSize: 1 + random.IntN(30)}, nil)
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
			end = time.After(time.Duration(random.IntN(300)) * time.Millisecond)
		}
		over := false
		for receiving := true; receiving; {
			select {
			case msg := <-messages:
				l.record(t, msg)
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
