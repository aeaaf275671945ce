//go:build !race

package tests

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	wmtests "github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/stretchr/testify/assert"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// TestWatermillSuiteReconnect is the part of Watermill's suite that restarts the
// server. It reads and appends to a slice of its own without synchronisation, so
// it cannot run under the race detector; TestReconnect does the same without.
func TestWatermillSuiteReconnect(t *testing.T) {
	f, server := newOwnFixture(t, pgtest.Options{})
	s := newSuite(t, f, testMode, outbox.OrderingStrict)
	restarts := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		assert.NoError(t, server.Restart(context.Background(), pgtest.Fast))
	}))
	t.Cleanup(restarts.Close)
	t.Setenv(childRestart, restarts.URL)

	features := suiteFeatures(false, outbox.OrderingStrict)
	features.RestartServiceCommand = []string{os.Args[0]}
	wmtests.TestReconnect(t, wmtests.TestContext{TestID: wmtests.NewTestID(), Features: features},
		func(t *testing.T) (message.Publisher, message.Subscriber) {
			publisher, subscriber := s.sharedGroup(t)
			last := &lastMessage{published: make(chan struct{}), seen: map[string]bool{}}
			return countingPublisher{publisher, last}, holdingSubscriber{subscriber, last}
		})
}

// lastMessage holds the last message that the suite waits for until it has noted
// all as sent. It does that in goroutines that nobody can wait for, some
// microseconds after Publish has returned, and we may be faster.
type lastMessage struct {
	returned  atomic.Int32
	published chan struct{}
	seen      map[string]bool
}

// suiteReconnectMessages is how many messages the suite publishes.
const suiteReconnectMessages = 10_000

type countingPublisher struct {
	message.Publisher
	last *lastMessage
}

func (p countingPublisher) Publish(topic string, messages ...*message.Message) error {
	err := p.Publisher.Publish(topic, messages...)
	if err == nil && p.last.returned.Add(int32(len(messages))) == suiteReconnectMessages {
		close(p.last.published)
	}
	return err
}

type holdingSubscriber struct {
	message.Subscriber
	last *lastMessage
}

func (s holdingSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := s.Subscriber.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for msg := range in {
			s.last.seen[msg.UUID] = true
			if len(s.last.seen) == suiteReconnectMessages {
				<-s.last.published
				time.Sleep(100 * time.Millisecond) // what is awaited happens inside the suite
			}
			out <- msg
		}
	}()
	return out, nil
}

func init() {
	children[childRestart] = func() error {
		response, err := http.Get(os.Getenv(childRestart)) //nolint:noctx // a child process with nothing else to do
		if err != nil {
			return err
		}
		defer func() { _ = response.Body.Close() }()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("restart: %s", response.Status)
		}
		return nil
	}
}
