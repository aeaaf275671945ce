package tests

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// closeManyTimes calls both Close methods from 16 goroutines and waits for all.
func closeManyTimes(t *testing.T, subscriber *outbox.Subscriber, consumer *outbox.Consumer) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			if i%2 == 0 {
				assert.NoError(t, subscriber.Close())
			}
			assert.NoError(t, consumer.Close())
			assert.NoError(t, subscriber.Close())
		})
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		wg.Wait()
	}()
	select {
	case <-closed:
	case <-time.After(2 * waitFor): // of a silent server pgx takes leave for 15 seconds
		require.FailNow(t, "Close hangs")
	}
}

// requireClosed fails unless a channel is closed and empty.
func requireClosed(t testing.TB, messages <-chan *message.Message) {
	t.Helper()
	select {
	case _, open := <-messages:
		require.False(t, open, "a message is in the channel")
	default:
		require.FailNow(t, "the channel is still open")
	}
}

// Close waits for what never began, panics the second time, or hangs on whoever
// does not read. It ends in whatever state it finds the subscriber, as often as
// it is called, and returns nil. Field case F54.
func TestClose(t *testing.T) {
	t.Parallel()

	states := map[string]func(t *testing.T, f *fixture, c *outbox.Consumer, s *outbox.Subscriber) []<-chan *message.Message{
		"before Subscribe": func(*testing.T, *fixture, *outbox.Consumer, *outbox.Subscriber) []<-chan *message.Message {
			return nil
		},
		"idle": func(t *testing.T, _ *fixture, _ *outbox.Consumer, s *outbox.Subscriber) []<-chan *message.Message {
			messages, err := s.Subscribe(context.Background(), "topic")
			require.NoError(t, err)
			return []<-chan *message.Message{messages}
		},
		"nobody reads": func(t *testing.T, f *fixture, _ *outbox.Consumer, s *outbox.Subscriber) []<-chan *message.Message {
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(50)...))
			var channels []<-chan *message.Message
			for range 3 {
				messages, err := s.Subscribe(context.Background(), "topic")
				require.NoError(t, err)
				channels = append(channels, messages)
			}
			f.awaitHolder(t, "topic")
			return channels
		},
		"a message is never acked": func(t *testing.T, f *fixture, _ *outbox.Consumer, s *outbox.Subscriber) []<-chan *message.Message {
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(50)...))
			messages, err := s.Subscribe(context.Background(), "topic")
			require.NoError(t, err)
			requireAckable(t, nextMessage(t, messages))
			return []<-chan *message.Message{messages}
		},
		"another process has the topic": func(t *testing.T, f *fixture, _ *outbox.Consumer, s *outbox.Subscriber) []<-chan *message.Message {
			f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
			f.awaitHolder(t, "topic")
			messages, err := s.Subscribe(context.Background(), "topic")
			require.NoError(t, err)
			return []<-chan *message.Message{messages}
		},
		"the context has ended": func(t *testing.T, _ *fixture, _ *outbox.Consumer, s *outbox.Subscriber) []<-chan *message.Message {
			ctx, cancel := context.WithCancel(context.Background())
			messages, err := s.Subscribe(ctx, "topic")
			require.NoError(t, err)
			cancel()
			return []<-chan *message.Message{messages}
		},
	}
	for name, prepare := range states {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			consumer := f.consumer(nil)
			subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{CloseTimeout: 50 * time.Millisecond}, nil)
			require.NoError(t, err)
			channels := prepare(t, f, consumer, subscriber)
			closeManyTimes(t, subscriber, consumer)
			for _, messages := range channels {
				requireClosed(t, messages)
			}
			_, err = subscriber.Subscribe(t.Context(), "topic")
			require.ErrorIs(t, err, outbox.ErrSubscriberClosed)
			require.ErrorIs(t, subscriber.SubscribeInitialize("topic"), outbox.ErrSubscriberClosed)
			_, err = outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
			require.ErrorIs(t, err, outbox.ErrSubscriberClosed)
		})
	}
}

// requireAckable fails if a message's context has ended.
func requireAckable(t testing.TB, msg *message.Message) {
	t.Helper()
	require.NoError(t, msg.Context().Err())
}

// awaitHolder waits until somebody has the topic.
func (f *fixture) awaitHolder(t testing.TB, topic string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM outbox.cursors WHERE topic = $1 AND holder IS NOT NULL", topic) == 1
	}, waitFor, 2*time.Millisecond, "nobody takes the topic")
}

// A closed Subscriber closes nothing but itself.
func TestClosedSubscriberLeavesItsConsumerOpen(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(4)
	require.NoError(t, publisher.Publish("topic", sent[:2]...))
	first, _ := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a"}, "topic")
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "b"}, "topic")
	requireNext(t, messages, sent[:2]...)
	require.NoError(t, first.Close())
	require.NoError(t, publisher.Publish("topic", sent[2:]...))
	requireNext(t, messages, sent[2:]...)
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a"}, "topic")
	requireNext(t, messages, sent...)
}

// Close with the database gone, or there and silent, which is worse: each
// question waits for its answer. Field case F54.
func TestCloseWithoutTheDatabase(t *testing.T) {
	t.Parallel()

	ways := map[string]func(*pgtest.Proxy){
		"refuses": func(p *pgtest.Proxy) { p.RefuseNew(true); p.CutAll() },
		"silent":  func(p *pgtest.Proxy) { p.Pause() },
	}
	for name, fail := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			proxy := f.proxy(t)
			db, err := pgxpool.ParseConfig(proxy.URL(f.url))
			require.NoError(t, err)
			consumer := f.consumerOn(db, nil)
			subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{CloseTimeout: -1}, "topic")
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(3)...))
			msg := nextMessage(t, messages)
			fail(proxy)
			require.True(t, msg.Ack(), "nobody can store that")
			subscribing := make(chan error)
			go func() {
				_, err := subscriber.Subscribe(context.Background(), "another topic")
				subscribing <- err
			}()
			begin := time.Now()
			closeManyTimes(t, subscriber, consumer)
			t.Logf("closed in %s", time.Since(begin))
			requireClosed(t, messages)
			require.Error(t, await(t, subscribing))
		})
	}
}

// A batch is read, its first message is acked, the subscriber is closed, and the
// whole batch is marked as done: the others are lost. Only what was acked is.
// Field case F105.
func TestCloseAfterTheFirstOfAPage(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := newMessages(100)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	subscriber, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 100, CloseTimeout: -1}, "topic")
	requireNext(t, messages, sent[0])
	second := nextMessage(t, messages)
	require.Equal(t, sent[1].UUID, second.UUID)
	require.NoError(t, subscriber.Close())
	require.Error(t, second.Context().Err())
	require.True(t, second.Ack(), "too late")

	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 100}, "topic")
	requireNext(t, messages, sent[1:]...)
}

// The Router ends the context of a subscription while its handlers run. An ack
// that comes after that, for work that is done, must be stored, or the work is
// done again. Field case F53.
func TestAckAfterTheContextOfSubscribeHasEnded(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	sent := newMessages(3)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{CloseTimeout: waitFor}, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	messages, err := subscriber.Subscribe(ctx, "topic")
	require.NoError(t, err)
	msg := nextMessage(t, messages)
	cancel()
	require.NoError(t, msg.Context().Err(), "the handler still has its time")
	require.True(t, msg.Ack())
	_, open := <-messages
	require.False(t, open)

	// The Subscriber is as good as new, and the ack is stored.
	messages, err = subscriber.Subscribe(t.Context(), "topic")
	require.NoError(t, err)
	requireNext(t, messages, sent[1])
	require.NoError(t, consumer.Close())
	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[2])
}

// What a message in flight has of the grace period: Close waits for its ack, and
// hands out nothing meanwhile.
func TestCloseWaitsForAMessageInFlight(t *testing.T) {
	t.Parallel()

	for name, acks := range map[string]bool{"acked": true, "nacked": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			sent := newMessages(2)
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
			subscriber, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{CloseTimeout: waitFor}, "topic")
			msg := nextMessage(t, messages)
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				assert.NoError(t, subscriber.Close())
			}()
			require.Eventually(t, func() bool {
				_, err := subscriber.Subscribe(t.Context(), "topic")
				return err != nil
			}, waitFor, time.Millisecond, "Close has not begun")
			select {
			case <-closed:
				require.FailNow(t, "Close did not wait")
			case <-messages:
				require.FailNow(t, "the channel was closed, or something handed out, before the message was acked")
			default:
			}
			require.NoError(t, msg.Context().Err())
			if acks {
				require.True(t, msg.Ack())
			} else {
				require.True(t, msg.Nack())
				sent = append(sent[:1:1], sent...)
			}
			await(t, closed)
			requireClosed(t, messages)
			_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
			requireNext(t, messages, sent[1:]...)
		})
	}
}

// A handler that does not end is waited for as long as it was said, and not
// longer; then its context ends, and its message is somebody else's.
func TestCloseGivesUpAfterItsTimeout(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := newMessages(2)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	const grace = 500 * time.Millisecond
	subscriber, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{CloseTimeout: grace}, "topic")
	msg := nextMessage(t, messages)
	begin := time.Now()
	go func() { assert.NoError(t, subscriber.Close()) }()
	await(t, msg.Context().Done())
	require.GreaterOrEqual(t, time.Since(begin), grace)
	require.NoError(t, subscriber.Close())
	requireClosed(t, messages)
	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent...)
}

// Close is called by a handler, or by the one who reads the channel, too.
func TestCloseFromAHandler(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := newMessages(2)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	subscriber, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{CloseTimeout: 50 * time.Millisecond}, "topic")
	msg := nextMessage(t, messages)
	require.NoError(t, subscriber.Close())
	requireClosed(t, messages)
	require.Error(t, msg.Context().Err())
	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent...)
}

// The last position is written once, on a connection that may have died since it
// was used: a server restarted, somebody ended the session. That is found out by
// using it, and must not cost a clean end its cleanness: nothing is repeated, and
// nobody waits for a lease.
func TestCloseAfterTheConnectionsWereEnded(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := newMessages(20)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	consumer := f.consumer(func(c *outbox.ConsumerConfig) {
		// Only Close stores anything, and only a clean end lets go.
		c.CheckpointInterval, c.Lease = 10*waitFor, 10*waitFor
		c.PollInterval = outbox.MaxPollInterval
	})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[:10]...)
	require.Positive(t, f.number(`SELECT count(pg_terminate_backend(pid, 10000))::int FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'watermill-outbox'`))
	require.NoError(t, consumer.Close())

	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[10:]...)
}
