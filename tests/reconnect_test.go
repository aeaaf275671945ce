package tests

import (
	"context"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// A subscriber survives restarts of the server, clean ones and crashes: its
// channel stays open, and whatever publishers were told is stored arrives.
func TestReconnect(t *testing.T) {
	t.Parallel()

	const publishers, each = 10, 150
	f, server := newOwnFixture(t, pgtest.Options{})
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})

	stored := make(chan string, publishers*each)
	var wg sync.WaitGroup
	for range publishers {
		wg.Go(func() {
			for range each {
				msg := message.NewMessage(watermill.NewUUID(), nil)
				for try := 1; publisher.Publish("topic", msg) != nil; try++ {
					backoff.Wait(context.Background(), backoff.Policy{Min: 5e6, Max: 1e8}.Delay(try))
				}
				stored <- msg.UUID
			}
		})
	}
	go func() {
		wg.Wait()
		close(stored)
	}()

	received := map[string]int{}
	missing := map[string]bool{}
	restartAt := map[int]pgtest.Mode{publishers * each / 4: pgtest.Fast, publishers * each / 2: pgtest.Immediate, publishers * each * 3 / 4: pgtest.Fast}
	done := false
	for n := 0; !done || len(missing) > 0; {
		select {
		case uuid, ok := <-stored:
			if !ok {
				done, stored = true, nil
				continue
			}
			n++
			if received[uuid] == 0 {
				missing[uuid] = true
			}
			if mode, ok := restartAt[n]; ok {
				require.NoError(t, server.Restart(context.Background(), mode))
			}
		case msg, ok := <-messages:
			require.True(t, ok, "the channel was closed")
			received[msg.UUID]++
			delete(missing, msg.UUID)
			msg.Ack()
		case <-withTimeout(t, waitFor).Done():
			require.FailNow(t, "messages lost", "%d did not arrive", len(missing))
		}
	}
	require.GreaterOrEqual(t, len(received), publishers*each)
}
