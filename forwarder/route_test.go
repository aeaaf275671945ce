package forwarder

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/envelope"
)

// Each destination gets what is routed to it. A route that makes no sense leads
// nowhere, for all of them.
func TestRoute(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("both", "a", "none", "twice", "unknown", "invalid", "template", "last")...)
		a, b := newBroker(nil), newBroker(nil)
		run(t, Config{
			Source: source,
			Route: func(msg *message.Message, topic string) ([]Target, error) {
				require.Equal(t, "t", topic)
				switch msg.UUID {
				case "a2":
					return []Target{{Destination: "a", Topic: "elsewhere"}}, nil
				case "none3":
					return nil, nil
				case "twice4":
					return []Target{{Destination: "a"}, {Destination: "a", Topic: "again"}}, nil
				case "unknown5":
					return []Target{{Destination: "a"}, {Destination: "c"}}, nil
				case "invalid6":
					return []Target{{Destination: "a"}, {Destination: "b", Topic: "\xff"}}, nil
				case "template7":
					return []Target{{Destination: "a"}, {Destination: "b"}}, nil
				}
				return []Target{{Destination: "a"}, {Destination: "b", Topic: "b's"}}, nil
			},
			Destinations: []Destination{
				{Name: "a", Publisher: a, DeduplicationKey: NATSMessageID},
				{Name: "b", Publisher: b, Topic: "{metadata:missing}"},
			},
		}).wait()
		got := map[string]string{}
		for _, p := range a.took() {
			got[p.uuid+" "+p.topic] = p.metadata[NATSMessageID]
		}
		require.Equal(t, map[string]string{
			"both1 t": "7-1", "a2 elsewhere": "7-2", "twice4 t": "7-4", "twice4 again": "7-4-1", "last8 t": "7-8",
		}, got)
		got = map[string]string{}
		for _, p := range b.took() {
			got[p.uuid] = p.topic
			require.Empty(t, p.metadata, "unchanged")
		}
		require.Equal(t, map[string]string{"both1": "b's", "last8": "b's"}, got)
		for _, name := range []string{"a", "b"} {
			require.Equal(t, []int64{5, 6, 7}, source.deadIDs(name))
			var wrong *RouteError
			require.ErrorAs(t, source.reason(name, 5), &wrong)
			require.Equal(t, "c", wrong.Destination)
			require.Equal(t, "t", wrong.Topic)
			require.ErrorIs(t, wrong, ErrUnknownDestination)
			require.ErrorIs(t, source.reason(name, 6), ErrInvalidTopic)
			require.ErrorIs(t, source.reason(name, 7), ErrInvalidTopic)
			require.Equal(t, 1, source.failedAttempts(name, 5), "no attempt would do better")
		}
	})
}

// The middlewares of a Router do here what they do there.
func TestMiddlewares(t *testing.T) {
	bubble(t, func(t *testing.T) {
		type key struct{}
		source := storing(rowsOf("filter", "split", "fails", "panics", "well")...)
		for i := range source.rows {
			source.rows[i].metadata = message.Metadata{middleware.CorrelationIDMetadataKey: "c"}
		}
		b := newBroker(nil)
		var seen []any
		b.verdict = func(_ string, msg *message.Message) error {
			b.mu.Lock()
			defer b.mu.Unlock()
			seen = append(seen, msg.Context().Value(key{}))
			return msg.Context().Err()
		}
		fails := 2
		f := run(t, Config{
			Source: source, MaxAttempts: 5,
			Destinations: []Destination{{Publisher: b, MaxInFlight: 1, DeduplicationKey: NATSMessageID}},
			Middlewares: []message.HandlerMiddleware{
				middleware.CorrelationID, middleware.Recoverer, middleware.Timeout(time.Second),
				func(next message.HandlerFunc) message.HandlerFunc {
					return func(msg *message.Message) ([]*message.Message, error) {
						msg.SetContext(context.WithValue(msg.Context(), key{}, "value"))
						msg.Metadata.Set("seen", "yes")
						switch msg.UUID {
						case "filter1":
							return nil, nil
						case "split2":
							return message.Messages{msg, message.NewMessage("new", nil)}, nil
						case "fails3":
							if fails--; fails >= 0 {
								return nil, errOdd
							}
						case "panics4":
							panic("boom")
						}
						return next(msg)
					}
				},
			},
		})
		f.wait()
		got := map[string]message.Metadata{}
		for _, p := range b.took() {
			got[p.uuid] = p.metadata
		}
		require.Equal(t, map[string]message.Metadata{
			"split2": {"correlation_id": "c", "seen": "yes", NATSMessageID: "7-2"}, "new": {"correlation_id": "c", NATSMessageID: "7-2-1"},
			"fails3": {"correlation_id": "c", "seen": "yes", NATSMessageID: "7-3"}, "well5": {"correlation_id": "c", "seen": "yes", NATSMessageID: "7-5"},
		}, got)
		require.Equal(t, []int64{1, 2, 3, 5}, source.ackedIDs("default"))
		require.Equal(t, []int64{4}, source.deadIDs("default"))
		require.ErrorContains(t, source.reason("default", 4), "boom")
		require.Equal(t, 2, source.failedAttempts("default", 3))
		require.Equal(t, []any{"value", nil, "value", "value"}, seen, "values of middlewares arrive, and though Timeout ended their contexts they are published")
	})
}

// A publisher may do with a message what it likes: the next attempt gets a new one.
// What was published of several is not published again.
func TestAttemptsAreFresh(t *testing.T) {
	bubble(t, func(t *testing.T) {
		type key struct{}
		source := storing(rowsOf("k")...)
		source.rows[0].metadata = message.Metadata{"a": "1"}
		var attempts int
		b := newBroker(nil)
		b.verdict = func(_ string, msg *message.Message) error {
			if msg.Context().Value(key{}) != nil || len(msg.Metadata) != 1 {
				panic("it was seen before")
			}
			msg.SetContext(context.WithValue(msg.Context(), key{}, true))
			msg.Metadata.Set("b", "2")
			msg.UUID += "!"
			if attempts++; attempts == 2 || attempts == 3 {
				return errDown
			}
			delete(msg.Metadata, "b")
			return nil
		}
		run(t, Config{
			Source: source, Destinations: []Destination{{Publisher: b}},
			Route: func(*message.Message, string) ([]Target, error) { return []Target{{Topic: "x"}, {Topic: "y"}}, nil },
		}).wait()
		require.Equal(t, 4, attempts)
		require.Equal(t, "x", b.took()[0].topic)
		require.Equal(t, "y", b.took()[1].topic)
		require.Len(t, b.took(), 2)
	})
}

// The context of a message has the deadline; a publisher that was too late need not
// say so: it is the destination's fault.
func TestPublishTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k", "l")...)
		source.live = true
		b := newBroker(nil)
		b.takes = 0
		b.verdict = func(_ string, msg *message.Message) error {
			deadline, ok := msg.Context().Deadline()
			require.True(t, ok)
			require.Equal(t, 2*time.Second, time.Until(deadline))
			if msg.UUID == "k1" && b.tried("k1") < 20 {
				<-msg.Context().Done()
				return errOdd
			}
			time.Sleep(time.Second)
			return nil
		}
		f := run(t, Config{Source: source, MaxAttempts: 1, Destinations: []Destination{{Publisher: b, PublishTimeout: 2 * time.Second}}})
		for i := range 300 { // others are taken all the while
			source.add(row{number: int64(10 + i), topic: "t", uuid: fmt.Sprint("free", i)})
			time.Sleep(time.Second)
		}
		f.end()
		require.Len(t, b.took(), 302)
		require.Equal(t, 20, b.tried("k1"))
		require.Zero(t, source.failedAttempts("default", 1))
	})
}

// Envelopes are opened on the way in and made on the way out; what is none is a dead
// letter.
func TestEnvelopes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		inner := message.NewMessage("inner", []byte("payload"))
		inner.Metadata.Set("a", "1")
		outer, err := envelope.Wrap("orders", inner)
		require.NoError(t, err)
		source := storing(
			row{number: 1, topic: "envelopes", uuid: outer.UUID, payload: string(outer.Payload)},
			row{number: 2, topic: "envelopes", uuid: "none", payload: "no envelope"},
			row{number: 3, topic: "plain", uuid: "plain", payload: string(outer.Payload)},
		)
		b, wrapped := newBroker(nil), newBroker(nil)
		run(t, Config{Source: source, UnwrapTopic: "envelopes", Destinations: []Destination{
			{Name: "open", Publisher: b, Topic: "to.{topic}"},
			{Name: "closed", Publisher: wrapped, Topic: "to.{topic}", EnvelopeTopic: "forwarder", DeduplicationKey: NATSMessageID},
		}}).wait()
		got := map[string]published{}
		for _, p := range b.took() {
			p.at = 0
			got[p.uuid] = p
		}
		require.Equal(t, map[string]published{
			"inner": {"to.orders", "inner", "payload", message.Metadata{"a": "1"}, 0},
			"plain": {"to.plain", "plain", string(outer.Payload), message.Metadata{}, 0},
		}, got)
		require.ErrorIs(t, source.reason("open", 2), envelope.ErrNotEnvelope)
		require.Equal(t, []int64{2}, source.deadIDs("closed"))
		ids := map[string]string{}
		for _, p := range wrapped.took() {
			require.Equal(t, "forwarder", p.topic)
			topic, msg, err := envelope.Unwrap(message.NewMessage(p.uuid, []byte(p.payload)))
			require.NoError(t, err)
			require.NotContains(t, msg.Metadata, NATSMessageID)
			ids[topic+" "+msg.UUID] = p.metadata[NATSMessageID]
		}
		require.Equal(t, map[string]string{"to.orders inner": "7-1", "to.plain plain": "7-3"}, ids, "the broker sees the id")
	})
}

// A message is acked if and only if it is stored in the poison topic. Field case F60.
func TestPoisonTopic(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("bad", "bad", "well")...)
		source.rows[0].metadata = message.Metadata{"a": "1"}
		b := newBroker(nil)
		down := 3
		b.verdict = func(topic string, _ *message.Message) error {
			if topic != "poison" {
				return nil
			}
			if down--; down >= 0 {
				require.Empty(t, source.deadIDs("default"))
				require.NotContains(t, source.ackedIDs("default"), int64(1))
				return errDown
			}
			return nil
		}
		run(t, Config{
			Source: source, MaxAttempts: 2, Destinations: []Destination{{Publisher: b, PoisonTopic: "poison"}},
			Middlewares: []message.HandlerMiddleware{func(next message.HandlerFunc) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					if msg.UUID == "bad1" {
						return nil, fmt.Errorf("bad: %w", errOdd)
					}
					return next(msg)
				}
			}},
		}).wait()
		var poisoned []published
		for _, p := range b.took() {
			if p.topic == "poison" {
				p.at = 0
				poisoned = append(poisoned, p)
			}
		}
		require.Equal(t, []published{{"poison", "bad1", "payload of bad1", message.Metadata{
			"a": "1", "reason_poisoned": "forwarder: middleware: bad: no", "topic_poisoned": "t",
			"handler_poisoned": "forwarder", "subscriber_poisoned": "default",
		}, 0}}, poisoned)
		require.Equal(t, []int64{1, 2, 3}, source.ackedIDs("default"))
		require.Empty(t, source.deadIDs("default"))
		require.Equal(t, 1, source.failedAttempts("default", 1), "the last attempt ends in the poison topic")
	})
}

// What the poison topic does not take either, because it is too large, is a dead
// letter of the outbox: it must not hold up its line for ever.
func TestPoisonTopicRefuses(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("large", "large")...)
		b := newBroker(only("large1", errOdd))
		run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{
			Publisher: b, PoisonTopic: "poison", Classify: func(err error) Fault { return FaultPermanent },
		}}}).wait()
		require.Equal(t, []string{"large2"}, b.uuids())
		require.Equal(t, []int64{1}, source.deadIDs("default"))
		require.ErrorContains(t, source.reason("default", 1), "the poison topic does not take it")
		require.Equal(t, 2, b.tried("large1"))
	})
}
