package tests

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	wmtests "github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// suiteFeatures is what the outbox promises to Watermill.
func suiteFeatures(exactlyOnce bool, ordering outbox.Ordering) wmtests.Features {
	return wmtests.Features{
		ConsumerGroups:      true,
		ExactlyOnceDelivery: exactlyOnce, // without failures; also skips two tests about closing
		GuaranteedOrder:     ordering != outbox.OrderingUnordered,
		Persistent:          true,
	}
}

// suite makes the pairs that Watermill's tests ask for, all on one outbox.
type suite struct {
	*fixture
	consumer *outbox.Consumer
	ordering outbox.Ordering
}

func newSuite(t *testing.T, f *fixture, mode outbox.Mode, ordering outbox.Ordering) *suite {
	return &suite{fixture: f, ordering: ordering, consumer: f.consumer(func(config *outbox.ConsumerConfig) {
		config.Mode = mode
	})}
}

func (s *suite) pair(t *testing.T, group string) (message.Publisher, message.Subscriber) {
	// Called from goroutines of the suite, so nothing may FailNow here.
	publisher, err := outbox.NewPublisher(s.pool, outbox.PublisherConfig{
		Schema: oddSchema,
		// The suite's order is that of a topic, which by key takes one key.
		OrderingKey: func(string, *message.Message) string { return "the only key" },
	}, testLogger(t))
	assert.NoError(t, err)
	subscriber, err := outbox.NewSubscriber(s.consumer, outbox.SubscriberConfig{
		ConsumerGroup: group,
		PageSize:      50,
		Ordering:      s.ordering,
		// ContinueAfterErrors nacks one message 300 times.
		Retry:        outbox.RetryConfig{MinBackoff: 5 * time.Millisecond, MaxBackoff: 20 * time.Millisecond},
		CloseTimeout: time.Second,
	}, testLogger(t))
	assert.NoError(t, err)
	return publisher, subscriber
}

func (s *suite) sharedGroup(t *testing.T) (message.Publisher, message.Subscriber) {
	return s.pair(t, "test")
}

func (s *suite) ownGroup(t *testing.T) (message.Publisher, message.Subscriber) {
	return s.pair(t, watermill.NewUUID())
}

// modes are all modes of a Consumer.
var modes = []outbox.Mode{outbox.ModePoll, outbox.ModeAuto, outbox.ModeWAL}

// orderings are all orderings of a Subscriber.
var orderings = []outbox.Ordering{outbox.OrderingStrict, outbox.OrderingByKey, outbox.OrderingUnordered}

// TestWatermillSuite runs Watermill's own tests in every mode and ordering, on a
// server of its own: on a shared one the stream would wait for other tests' transactions.
func TestWatermillSuite(t *testing.T) {
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()

			f, _ := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_connections": "300"}})
			for name, exactlyOnce := range map[string]bool{"at least once": false, "exactly once": true} {
				for _, ordering := range orderings {
					if exactlyOnce && (ordering != outbox.OrderingStrict || mode != outbox.ModeAuto) {
						continue // no ordering and no mode has a part in that
					}
					t.Run(name+" "+string(ordering), func(t *testing.T) {
						s := newSuite(t, f, mode, ordering)
						s.awaitSource(t, mode)
						wmtests.TestPubSub(t, suiteFeatures(exactlyOnce, ordering), s.sharedGroup, s.pair)
					})
				}
			}
			t.Run("old messages", func(t *testing.T) {
				s := newSuite(t, f, mode, outbox.OrderingStrict)
				features := suiteFeatures(false, outbox.OrderingStrict)
				features.NewSubscriberReceivesOldMessages = true
				wmtests.TestNewSubscriberReceivesOldMessages(t, wmtests.TestContext{TestID: wmtests.NewTestID(), Features: features}, s.ownGroup)
			})
		})
	}
}

// awaitSource subscribes to a topic of its own, so that the Consumer has a
// stream, and waits for that, unless it polls.
func (s *suite) awaitSource(t *testing.T, mode outbox.Mode) {
	t.Helper()
	s.subscribe(s.consumer, outbox.SubscriberConfig{}, watermill.NewUUID())
	if mode != outbox.ModePoll {
		awaitLive(t, s.consumer)
	}
}

// newOwnFixture is an outbox on a server of its own, that may be restarted.
func newOwnFixture(t *testing.T, options pgtest.Options) (*fixture, *pgtest.Server) {
	t.Helper()
	server, err := pgtest.Start(context.Background(), options)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	return fixtureAt(t, server.URL()), server
}
