package forwarder

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// fakeSubscriber hands out messages without waiting for acks, as some Pub/Subs do,
// and ends their contexts when its subscription ends, as others do.
type fakeSubscriber struct {
	messages []*message.Message
	// more keeps the channel open when all are handed out.
	more bool

	mu             sync.Mutex
	handed, closed int
	cancels        []context.CancelFunc
	topics         []string
	running        sync.WaitGroup
	ctx            context.Context //nolint:containedctx // of the subscription
}

func (s *fakeSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	s.mu.Lock()
	s.topics = append(s.topics, topic)
	s.ctx = ctx
	s.mu.Unlock()
	s.running.Go(func() {
		defer close(out)
		for _, msg := range s.messages {
			ctx, cancel := context.WithCancel(ctx)
			msg.SetContext(ctx)
			s.mu.Lock()
			s.cancels = append(s.cancels, cancel)
			s.mu.Unlock()
			select {
			case out <- msg:
				s.mu.Lock()
				s.handed++
				s.mu.Unlock()
			case <-ctx.Done():
				return
			}
		}
		if s.more {
			<-ctx.Done()
		}
	})
	return out, nil
}

func (s *fakeSubscriber) Close() error {
	s.mu.Lock()
	s.closed++
	cancels := s.cancels
	s.mu.Unlock()
	for _, cancel := range cancels {
		cancel()
	}
	return nil
}

func messagesOf(keys ...string) []*message.Message {
	messages := make([]*message.Message, len(keys))
	for i, r := range rowsOf(keys...) {
		messages[i] = message.NewMessage(r.uuid, []byte(r.payload))
		if r.key != "" {
			messages[i].Metadata.Set(outbox.DefaultKeyMetadata, r.key)
		}
	}
	return messages
}

func isAcked(msg *message.Message) bool {
	select {
	case <-msg.Acked():
		return true
	default:
		return false
	}
}

func isNacked(msg *message.Message) bool {
	select {
	case <-msg.Nacked():
		return true
	default:
		return false
	}
}

// From Watermill's own Pub/Sub in memory, in real time: it waits with a mutex held,
// which stops the virtual one.
func TestFromGoChannel(t *testing.T) {
	t.Parallel()

	pubSub := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
	require.NoError(t, pubSub.Publish("t", messagesOf("k", "l", "k")...))
	require.NoError(t, pubSub.Publish("other", messagesOf("m")...))
	b := newBroker(nil)
	var mu sync.Mutex
	failures, taken := 3, make(chan struct{}, 4)
	b.become(func(string, *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if failures--; failures >= 0 {
			return errDown
		}
		taken <- struct{}{}
		return nil
	})
	f := run(t, Config{
		Source: FromSubscriber(pubSub, "t", "other"),
		Destinations: []Destination{{
			Publisher: b, Topic: "to.{topic}", MaxInFlight: 1, DeduplicationKey: NATSMessageID, DeduplicateBy: ByUUID, MinBackoff: time.Millisecond,
		}},
	})
	for range cap(taken) {
		<-taken
	}
	f.end()
	got := map[string][]string{}
	for _, p := range b.took() {
		got[p.topic] = append(got[p.topic], p.uuid)
		require.Equal(t, p.uuid, p.metadata[NATSMessageID])
	}
	slices.Sort(got["to.t"])
	require.Equal(t, map[string][]string{"to.t": {"k1", "k3", "l2"}, "to.other": {"m1"}}, got)
	require.Error(t, pubSub.Publish("t", messagesOf("x")...), "the forwarder closes its Subscriber")
}

// Lines keep their order though the Subscriber does not wait; what is out is bounded.
func TestSubscriberLines(t *testing.T) {
	bubble(t, func(t *testing.T) {
		keys := make([]string, 60)
		for i := range keys {
			keys[i] = string(rune('a' + i%3))
		}
		subscriber := &fakeSubscriber{messages: messagesOf(keys...)}
		b := newBroker(nil)
		fails := map[string]int{"a1": 3, "b20": 1, "c30": 2}
		b.verdict = func(_ string, msg *message.Message) error {
			b.mu.Lock()
			defer b.mu.Unlock()
			if fails[msg.UUID]--; fails[msg.UUID] >= 0 {
				return errOdd
			}
			return nil
		}
		run(t, Config{Source: FromSubscriber(subscriber, "t"), Destinations: []Destination{{Publisher: b, MaxInFlight: 5}}}).wait()
		require.Len(t, b.took(), 60)
		require.LessOrEqual(t, b.mostAtOnce(), 3)
		last := map[string]int{}
		for _, p := range b.took() {
			var n int
			_, err := fmt.Sscanf(p.uuid[1:], "%d", &n)
			require.NoError(t, err)
			require.Greater(t, n, last[p.uuid[:1]])
			last[p.uuid[:1]] = n
		}
		for _, msg := range subscriber.messages {
			require.True(t, isAcked(msg))
			require.False(t, isNacked(msg), "what a Nack leads to is different everywhere")
		}
	})
}

func TestASubscriberIsNotRunAheadOf(t *testing.T) {
	bubble(t, func(t *testing.T) {
		subscriber := &fakeSubscriber{messages: messagesOf(make([]string, 50)...)}
		f := run(t, Config{Source: FromSubscriber(subscriber, "t"), Destinations: []Destination{{Publisher: newBroker(always(errDown)), MaxInFlight: 4}}})
		time.Sleep(time.Minute)
		subscriber.mu.Lock()
		require.Equal(t, 5, subscriber.handed, "one is held for a place")
		subscriber.mu.Unlock()
		f.end()
		for _, msg := range subscriber.messages[:5] {
			require.True(t, isNacked(msg), "what is neither acked nor nacked leaves a goroutine with some decorators")
		}
	})
}

// What is being published at the end gets CloseTimeout, though this Subscriber ends
// contexts with its subscription; what is left is nacked later than that.
func TestASubscriberIsClosedLast(t *testing.T) {
	bubble(t, func(t *testing.T) {
		subscriber := &fakeSubscriber{messages: messagesOf("k", "k", "l"), more: true}
		b := newBroker(func(_ string, msg *message.Message) error { return msg.Context().Err() })
		b.takes = 3 * time.Second
		f := run(t, Config{Source: FromSubscriber(subscriber, "t"), Destinations: []Destination{{Publisher: b}}})
		time.Sleep(time.Second)
		var nacked, over bool
		go func() {
			<-subscriber.messages[1].Nacked()
			nacked, over = true, subscriber.ctx.Err() != nil
		}()
		f.end()
		synctest.Wait()
		require.True(t, isAcked(subscriber.messages[0]))
		require.True(t, isAcked(subscriber.messages[2]))
		require.False(t, isAcked(subscriber.messages[1]))
		require.True(t, nacked)
		require.True(t, over, "a Nack in a subscription that goes on is a failure")
		require.Equal(t, 2, b.tries())
		require.Equal(t, 1, subscriber.closed)
	})
}

// When the end has come nothing more of a line is handed out: whoever happened to wait
// for messages got the second one, and published it, though the first was not.
func TestNothingOvertakesAtTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var keys []string
		for i := range 50 {
			keys = append(keys, fmt.Sprint("k", i, "-"), fmt.Sprint("k", i, "-"), fmt.Sprint("k", i, "-"))
		}
		subscriber := &fakeSubscriber{messages: messagesOf(keys...), more: true}
		f, err := FromSubscriber(subscriber, "t").open(settings{destination: Destination{MaxInFlight: 1000}}, nil)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		out, err := f.subscribe(ctx)
		require.NoError(t, err)
		synctest.Wait()
		cancel()
		closed := make(chan error, 1)
		go func() { closed <- f.close() }()
		var late []string
		for batch := range out {
			late = append(late, batch[0].UUID)
			f.leave(&consumed{Message: batch[0]})
		}
		require.Empty(t, late)
		require.NoError(t, <-closed)
		for _, msg := range subscriber.messages {
			require.True(t, isNacked(msg))
		}
	})
}

// A message whose context ends is left, and the next of its line goes.
func TestASubscriberTakesAMessageBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		subscriber := &fakeSubscriber{messages: messagesOf("k", "k", "k"), more: true}
		b := newBroker(func(_ string, msg *message.Message) error {
			if msg.UUID == "k1" {
				return errDown
			}
			return nil
		})
		f := run(t, Config{Source: FromSubscriber(subscriber, "t"), Destinations: []Destination{{Publisher: b}}})
		time.Sleep(time.Minute)
		require.Empty(t, b.took())
		subscriber.mu.Lock()
		cancel := subscriber.cancels[0]
		subscriber.cancels[1]() // which waits behind it
		subscriber.mu.Unlock()
		synctest.Wait()
		require.False(t, isNacked(subscriber.messages[1]))
		cancel()
		time.Sleep(time.Minute)
		require.Equal(t, []string{"k3"}, b.uuids())
		require.True(t, isNacked(subscriber.messages[0]))
		require.True(t, isNacked(subscriber.messages[1]))
		require.Zero(t, f.Status().Destinations[0].FailingCount)
		f.end()
	})
}

// Without dead letters and a poison topic a message is tried for ever; with one it is
// given up.
func TestASubscriberHasNoDeadLetters(t *testing.T) {
	for _, poison := range []string{"", "poison"} {
		t.Run(fmt.Sprintf("poison topic %q", poison), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				subscriber := &fakeSubscriber{messages: messagesOf("k", "k", "l"), more: true}
				failed := errors.New("failed")
				var mu sync.Mutex
				runs := 0
				b := newBroker(nil)
				f := run(t, Config{
					Source: FromSubscriber(subscriber, "t"), MaxAttempts: 3, Destinations: []Destination{{Publisher: b, PoisonTopic: poison}},
					Middlewares: []message.HandlerMiddleware{func(next message.HandlerFunc) message.HandlerFunc {
						return func(msg *message.Message) ([]*message.Message, error) {
							if msg.UUID == "k1" {
								mu.Lock()
								defer mu.Unlock()
								runs++
								return nil, failed
							}
							return next(msg)
						}
					}},
				})
				time.Sleep(time.Hour)
				synctest.Wait()
				mu.Lock()
				defer mu.Unlock()
				if poison == "" {
					require.Equal(t, []string{"l3"}, b.uuids())
					require.False(t, isAcked(subscriber.messages[0]))
					require.InDelta(t, 3600/9, runs, 60)
					require.GreaterOrEqual(t, f.Status().Destinations[0].Failing[0].Attempts, runs-1)
				} else {
					require.Equal(t, []string{"k1", "k2", "l3"}, slices.Sorted(slices.Values(b.uuids())))
					require.Equal(t, 3, runs)
				}
				mu.Unlock()
				f.end()
				mu.Lock()
			})
		})
	}
}

func TestFromSubscribers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		subscribers := map[string]*fakeSubscriber{"a": {messages: messagesOf("k")}, "b": {messages: messagesOf("k", "l")}}
		a, b := newBroker(nil), newBroker(nil)
		config := Config{
			Source: FromSubscribers(func(destination string) (message.Subscriber, error) {
				if s := subscribers[destination]; s != nil {
					return s, nil
				}
				return nil, nil
			}, "t"),
			Destinations: []Destination{{Name: "a", Publisher: a}, {Name: "b", Publisher: b}},
		}
		run(t, config).wait()
		require.Len(t, a.took(), 1)
		require.Len(t, b.took(), 2)
		require.Equal(t, 1, subscribers["a"].closed)

		config.Destinations = []Destination{{Name: "unheard of", Publisher: a}}
		f, err := New(config, nil)
		require.NoError(t, err)
		require.ErrorContains(t, f.Run(t.Context()), "returned none")
	})
}
