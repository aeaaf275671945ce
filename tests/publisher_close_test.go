package tests

import (
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

func TestPublisherCloseEndsPublishing(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	require.NoError(t, publisher.Publish("orders", newMessages(1)...))
	require.NoError(t, publisher.Close())
	require.NoError(t, publisher.Close())
	require.ErrorIs(t, publisher.Publish("orders", newMessages(1)...), outbox.ErrPublisherClosed)
	require.ErrorIs(t, publisher.Publish("orders"), outbox.ErrPublisherClosed)
	require.Len(t, f.stored(t, "orders"), 1)

	// The pool is the caller's: other publishers go on.
	require.NoError(t, f.pool.Ping(t.Context()))
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", newMessages(1)...))
}

// The Router closes the publisher of a handler while handlers still run. Close
// once held a lock that made new calls wait behind it, instead of refusing
// them: a handler that waited there with the last connection of the pool in its
// hands kept the call that Close was waiting for from ever getting one.
func TestPublisherCloseRefusesNewCallsWhileItWaits(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	inside, release := make(chan struct{}), make(chan struct{})
	publisher := f.publisher(outbox.PublisherConfig{OrderingKey: func(string, *message.Message) string {
		close(inside)
		<-release
		return ""
	}})
	published := make(chan error, 1)
	go func() { published <- publisher.Publish("orders", newMessages(1)...) }()
	<-inside

	closed := make(chan error, 3)
	var closing sync.WaitGroup
	for range cap(closed) {
		closing.Go(func() { closed <- publisher.Close() })
	}
	// Without messages Publish does nothing but look at whether it may.
	refused := make(chan error, 1)
	go func() {
		for {
			if err := publisher.Publish("orders"); err != nil {
				refused <- err
				return
			}
		}
	}()
	require.ErrorIs(t, await(t, refused), outbox.ErrPublisherClosed)
	require.Empty(t, closed, "Close returned before the running call")

	close(release)
	require.NoError(t, await(t, published))
	closing.Wait()
	for range cap(closed) {
		require.NoError(t, <-closed)
	}
	require.Len(t, f.stored(t, "orders"), 1)
}
