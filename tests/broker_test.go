package tests

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/brokertest"
	"github.com/millrace/watermill-outbox/internal/brokertest/jetstream"
	"github.com/millrace/watermill-outbox/internal/brokertest/kafka"
	"github.com/millrace/watermill-outbox/internal/brokertest/redis"
	"github.com/millrace/watermill-outbox/internal/brokertest/webhook"
)

// brokerKind is a kind of broker that messages are forwarded to.
type brokerKind struct {
	name string
	// open is for tests that only cut connections, start for those that end the
	// broker. They are the same where a start costs nothing.
	open, start func(context.Context) (brokertest.Broker, error)
	// connect returns a publisher to the broker at an address, in another process.
	connect func(address string, logger watermill.LoggerAdapter) (message.Publisher, error)
}

// brokerKinds are all kinds; RabbitMQ's is added in broker_rabbitmq_test.go.
var brokerKinds = []brokerKind{
	{"jetstream", asBroker(jetstream.Start), asBroker(jetstream.Start), jetstream.Connect},
	{"redis", asBroker(redis.Open), asBroker(redis.Start), redis.Connect},
	{"kafka", asBroker(openKafka), asBroker(startKafka), kafkaOptions.Connect},
	{"webhook", asBroker(webhook.Start), asBroker(webhook.Start), webhook.Connect},
}

var kafkaOptions = kafka.Options{KeyMetadata: outbox.DefaultKeyMetadata}

func openKafka(ctx context.Context) (*kafka.Broker, error) {
	return kafka.Open(ctx, kafkaOptions)
}

func startKafka(ctx context.Context) (*kafka.Broker, error) {
	return kafka.Start(ctx, kafkaOptions)
}

func asBroker[B brokertest.Broker](start func(context.Context) (B, error)) func(context.Context) (brokertest.Broker, error) {
	return func(ctx context.Context) (brokertest.Broker, error) { return start(ctx) }
}

// newBroker returns what start starts, until the test ends.
func newBroker(t *testing.T, start func(context.Context) (brokertest.Broker, error)) brokertest.Broker {
	t.Helper()
	broker, err := start(t.Context())
	require.NoError(t, err)
	brokertest.Cleanup(t, broker)
	return broker
}

// brokerPublisher returns a publisher to a broker, until the test ends.
func brokerPublisher(t *testing.T, broker brokertest.Broker) message.Publisher {
	t.Helper()
	publisher, err := broker.Publisher(testLogger(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, publisher.Close()) })
	return publisher
}

// publishUntilDone publishes a message again until it is confirmed, and returns how
// often it was not.
func publishUntilDone(t *testing.T, publisher message.Publisher, topic string, msg *message.Message) int {
	t.Helper()
	deadline := time.Now().Add(waitFor)
	for failed := 0; ; failed++ {
		err := publisher.Publish(topic, msg)
		if err == nil {
			return failed
		}
		require.True(t, time.Now().Before(deadline), "not published within %v: %v", waitFor, err)
		time.Sleep(time.Millisecond) // the pause of a retry
	}
}

// brokerMessages returns n messages of some keys, with metadata. Their payloads are
// nil, or any bytes.
func brokerMessages(n, keys int) []*message.Message {
	messages := make([]*message.Message, n)
	for i := range messages {
		var payload []byte
		if i%2 == 1 {
			payload = []byte{0, 0xff, '\n', byte(i)}
		}
		messages[i] = message.NewMessage(watermill.NewUUID(), payload)
		messages[i].Metadata = message.Metadata{
			outbox.DefaultKeyMetadata: "key " + strconv.Itoa(i%keys),
			"Number":                  strconv.Itoa(i),
			"text":                    `"ä" 'ß' \`,
		}
	}
	return messages
}

// requireInBroker checks that all messages are in the broker as they were, each key
// in order, and returns how many are there more than once.
func requireInBroker(t *testing.T, broker brokertest.Broker, topic string, want []*message.Message) (duplicates int) {
	t.Helper()
	received, err := broker.Received(t.Context(), topic)
	require.NoError(t, err)
	sent := map[string]*message.Message{}
	wantKeys := map[string][]string{}
	for _, msg := range want {
		sent[msg.UUID] = msg
		key := msg.Metadata[outbox.DefaultKeyMetadata]
		wantKeys[key] = append(wantKeys[key], msg.UUID)
	}
	seen := map[string]bool{}
	keys := map[string][]string{}
	for _, msg := range received {
		if seen[msg.UUID] {
			duplicates++
			continue
		}
		seen[msg.UUID] = true
		key := msg.Metadata[outbox.DefaultKeyMetadata]
		keys[key] = append(keys[key], msg.UUID)
		original := sent[msg.UUID]
		require.NotNil(t, original, "%s: what is %s?", broker.Name(), msg.UUID)
		require.Equal(t, original.Metadata, msg.Metadata, broker.Name())
		require.True(t, bytes.Equal(original.Payload, msg.Payload), "%s: payload %.100q became %.100q", broker.Name(), original.Payload, msg.Payload)
		require.NotNil(t, msg.Payload)
	}
	require.Equal(t, wantKeys, keys, broker.Name())
	return duplicates
}

// Each broker keeps what its publisher was told that it has, over a restart and cut
// connections.
func TestForwardBroker(t *testing.T) {
	t.Parallel()
	for _, kind := range brokerKinds {
		t.Run(kind.name, func(t *testing.T) {
			t.Parallel()
			broker := newBroker(t, kind.start)
			require.True(t, broker.Owned())
			require.Equal(t, kind.name, broker.Name())
			const topic = "orders"
			require.NoError(t, broker.Declare(t.Context(), topic))
			require.NoError(t, broker.Declare(t.Context(), topic), "again")
			publisher := brokerPublisher(t, broker)

			messages := brokerMessages(200, 10)
			var failed int
			for i, msg := range messages {
				switch i {
				case 50:
					broker.Proxy().CutAll()
				case 100:
					require.NoError(t, broker.Kill(t.Context()))
					require.ErrorIs(t, broker.Kill(t.Context()), brokertest.ErrDown)
					require.Error(t, publisher.Publish(topic, msg), "nobody is there")
					require.NoError(t, broker.StartAgain(t.Context()))
					require.ErrorIs(t, broker.StartAgain(t.Context()), brokertest.ErrRunning)
				}
				failed += publishUntilDone(t, publisher, topic, msg)
			}
			require.LessOrEqual(t, requireInBroker(t, broker, topic, messages), failed+1)

			require.NoError(t, broker.Shutdown())
			require.NoError(t, broker.Shutdown(), "twice")
			require.ErrorIs(t, broker.StartAgain(t.Context()), brokertest.ErrShutDown)
		})
	}
}

// A connection that is lost before the message has arrived, or after it has and
// before anybody was told, is an error to the publisher in both cases. The broker
// has the message once in the one and twice in the other when it is published again.
func TestForwardBrokerMidPublish(t *testing.T) {
	t.Parallel()
	for _, kind := range brokerKinds {
		for action, copies := range map[brokertest.Action]int{brokertest.Cut: 1, brokertest.LoseReply: 2} {
			t.Run(fmt.Sprintf("%s/%d", kind.name, copies), func(t *testing.T) {
				t.Parallel()
				broker := newBroker(t, kind.open)
				const topic = "orders"
				require.NoError(t, broker.Declare(t.Context(), topic))
				publisher := brokerPublisher(t, broker)

				messages := brokerMessages(3, 1)
				require.NoError(t, publisher.Publish(topic, messages[0]))
				var hit atomic.Bool
				broker.Proxy().OnClient(func(data []byte) brokertest.Action {
					if bytes.Contains(data, []byte(messages[1].UUID)) && hit.CompareAndSwap(false, true) {
						return action
					}
					return brokertest.Forward
				})
				require.Error(t, publisher.Publish(topic, messages[1]))
				require.True(t, hit.Load())
				for _, msg := range messages[1:] {
					publishUntilDone(t, publisher, topic, msg)
				}
				require.Equal(t, copies-1, requireInBroker(t, broker, topic, messages))
			})
		}
	}
}

// A broker refuses what it is told to, and what is too large for it, and goes on to
// take what is not.
func TestForwardBrokerRefuses(t *testing.T) {
	t.Parallel()
	for _, kind := range brokerKinds {
		t.Run(kind.name, func(t *testing.T) {
			t.Parallel()
			broker := newBroker(t, kind.open)
			const topic = "orders"
			publisher := brokerPublisher(t, broker)
			messages := brokerMessages(3, 1)
			for range 2 {
				require.NoError(t, broker.Refuse(t.Context(), topic))
				require.NoError(t, broker.Refuse(t.Context(), topic), "again")
				require.Error(t, publisher.Publish(topic, messages[0]))
				require.NoError(t, broker.Declare(t.Context(), topic))
				publishUntilDone(t, publisher, topic, messages[0])
				requireInBroker(t, broker, topic, messages[:1])
			}
			if limit := broker.MaxPayload(); limit > 0 {
				large := brokerMessages(1, 1)[0]
				large.Payload = make([]byte, limit+1)
				require.Error(t, publisher.Publish(topic, large))
				large.UUID, large.Payload = messages[1].UUID, large.Payload[:limit-limit/100]
				publishUntilDone(t, publisher, topic, large)
				messages[1] = large
			} else {
				publishUntilDone(t, publisher, topic, messages[1])
			}
			publishUntilDone(t, publisher, topic, messages[2])
			requireInBroker(t, broker, topic, messages)
		})
	}
}
