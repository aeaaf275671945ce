package tests

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
)

// pickyPublisher refuses one message, without saying why, and tells of the others.
type pickyPublisher struct {
	refuses string

	mu      sync.Mutex
	refused int
	asked   chan int
	taken   chan string
}

func newPickyPublisher(refuses string) *pickyPublisher {
	return &pickyPublisher{refuses: refuses, asked: make(chan int, 1000), taken: make(chan string, 1000)}
}

func (p *pickyPublisher) Publish(_ string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, msg := range messages {
		if msg.UUID == p.refuses {
			p.refused++
			p.asked <- p.refused
			return errors.New("no")
		}
		p.taken <- msg.UUID
	}
	return nil
}

func (p *pickyPublisher) Close() error { return nil }

// runForwarder runs a Forwarder until the test stops it.
func runForwarder(t *testing.T, config forwarder.Config, logger watermill.LoggerAdapter) (f *forwarder.Forwarder, stop func()) {
	t.Helper()
	f, err := forwarder.New(config, logger)
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		assert.NoError(t, f.Run(t.Context()))
	}()
	await(t, f.Running())
	return f, func() {
		require.NoError(t, f.Close())
		await(t, ended)
	}
}

// A message that is refused without a word is all there is: it waits, and spends
// nothing. What is published behind it later is the proof: it gets through, and the
// message becomes a dead letter. It once waited for ever, for it had been handed out
// alone.
func TestForwardSuspect(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	publish := func(uuid string) {
		msg := message.NewMessage(uuid, nil)
		msg.Metadata.Set(outbox.DefaultKeyMetadata, "key")
		require.NoError(t, publisher.Publish("topic", msg))
	}
	publish("first")
	out := newPickyPublisher("first")
	running, stop := runForwarder(t, forwarder.Config{
		Source:       forwarder.FromOutbox(f.consumer(nil), outbox.SubscriberConfig{Retry: outbox.RetryConfig{MinBackoff: 1, MaxBackoff: 1}}, outbox.AllTopics()),
		Destinations: []forwarder.Destination{{Publisher: out, MinBackoff: time.Millisecond, MaxBackoff: time.Millisecond}},
		MaxAttempts:  5,
	}, nil)
	for n := 0; n < 20; {
		n = receiveOne(t, out.asked)
	}
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
	require.Equal(t, 1, running.Status().Destinations[0].FailingCount)
	publish("second")
	publish("third")
	require.Equal(t, "second", receiveOne(t, out.taken))
	require.Equal(t, "third", receiveOne(t, out.taken))
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE uuid = 'first' AND error LIKE '%accepted at once%'"))
	stop()
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
}

// Two Forwarders with default options run beside each other and share the messages.
// Field case F107.
func TestForwardTwoWithDefaults(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(100)
	require.NoError(t, publisher.Publish("topic", sent...))
	out := newPickyPublisher("")
	consumer := f.consumer(nil)
	config := forwarder.Config{
		Source:       forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.AllTopics()),
		Destinations: []forwarder.Destination{{Publisher: out}},
	}
	_, stopFirst := runForwarder(t, config, nil)
	_, stopSecond := runForwarder(t, config, nil)
	var got []string
	for range sent {
		got = append(got, receiveOne(t, out.taken))
	}
	require.ElementsMatch(t, uuids(sent), got)
	stopFirst()
	more := newMessages(10)
	require.NoError(t, publisher.Publish("topic", more...))
	got = nil
	for range more {
		got = append(got, receiveOne(t, out.taken))
	}
	require.ElementsMatch(t, uuids(more), got, "the other one goes on")
	stopSecond()
	require.Empty(t, out.taken, "nothing came twice")
}

// receiveOne returns what comes next.
func receiveOne[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(waitFor):
		require.Fail(t, "nothing comes")
		panic("unreachable")
	}
}
