// Package rabbitmq is a RabbitMQ server for tests: a program of the machine, or the
// server named by OUTBOX_TEST_RABBITMQ_URL. Each topic is a durable queue,
// published to through the default exchange.
//
// A start takes seconds, so [Open] shares one server among the tests of a process:
// their queues differ by a prefix. A virtual host for each would take a call of
// rabbitmqctl, and so a start of another Erlang.
//
// What the publisher does when something is wrong, with the settings of
// [NewPublisher]:
//
//   - the broker is away: an error without a type, "not connected to AMQP", at once,
//     or *amqp091.Error (amqp091.ErrClosed, code 504) in the moment before that is
//     noticed;
//   - the connection is cut, or the queue refuses, while a confirmation is awaited:
//     an error without a type, "delivery not confirmed", and the message may be in
//     the queue;
//   - a confirmation does not come from a connection that stays: nothing, until a
//     heartbeat fails; for ever when there are heartbeats, as with an alarm of memory
//     or disk. The message's context does not end that wait;
//   - the message is too big for the server: the same, since the server closes the channel
//     (code 406);
//   - there is no queue of that name: nil, and the message is lost. See Declare.
//
// The race detector reports watermill-amqp v3.0.2: Publish looks at whether it is
// connected while its connection's goroutine writes that.
package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmamqp "github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// EnvURL is the environment variable that names a server to use, as an amqp:// URL.
const EnvURL = "OUTBOX_TEST_RABBITMQ_URL"

// Broker is a RabbitMQ server.
type Broker struct {
	*brokertest.Base

	url    *url.URL // past the Proxy
	prefix string

	mu      sync.Mutex
	topics  []string
	refused map[string]bool // by topic
	// declared is when a queue was last made.
	declared time.Time
}

// metadataTime is how long the server may keep in memory what it was told of queues:
// Erlang's disk_log writes after two seconds, and nothing says that it has. A server
// that is killed sooner does not know a durable queue any more, and confirms what is
// published to it all the same.
const metadataTime = 3 * time.Second

// Kill implements [brokertest.Broker]. It waits until queues are on disk.
func (b *Broker) Kill(ctx context.Context) error {
	b.mu.Lock()
	wait := time.Until(b.declared.Add(metadataTime))
	b.mu.Unlock()
	select {
	case <-time.After(wait):
		return b.Base.Kill(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

var _ brokertest.Broker = (*Broker)(nil)

// shared is the server of Open. It ends with the process, and must be held until then:
// a pipe that the garbage collector closes ends it, too.
var shared struct {
	mu     sync.Mutex
	server *server
	err    error
}

// Open returns the server named by OUTBOX_TEST_RABBITMQ_URL, or else the one that all
// callers in this process share. It is not Owned in either case. ctx governs the
// start alone.
func Open(ctx context.Context) (*Broker, error) {
	u, err := sharedURL(ctx)
	if err != nil {
		return nil, err
	}
	b := &Broker{url: u, prefix: brokertest.Prefix(), refused: map[string]bool{}}
	if err := b.ping(ctx); err != nil {
		return nil, fmt.Errorf("rabbitmq: the shared server, or that named by %s, does not answer: %w", EnvURL, err)
	}
	b.Base, err = brokertest.NewBase(ctx, u.Host, brokertest.Engine{Remove: b.forget})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func sharedURL(ctx context.Context) (*url.URL, error) {
	if given := os.Getenv(EnvURL); given != "" {
		u, err := url.Parse(given)
		if err != nil || u.Scheme != "amqp" || u.Port() == "" {
			// url.Parse's error may have the password.
			return nil, fmt.Errorf("rabbitmq: %s is not the URL of a server; it should look like amqp://user:password@host:5672/", EnvURL)
		}
		return u, nil
	}
	shared.mu.Lock()
	defer shared.mu.Unlock()
	// A failure is kept: trying again for each test would take minutes.
	if shared.server == nil && shared.err == nil {
		shared.server, shared.err = startServer(ctx)
	}
	if shared.err != nil {
		return nil, shared.err
	}
	return shared.server.url, nil
}

// startServer starts a server that the process ends with.
func startServer(ctx context.Context) (*server, error) {
	ctx, cancel := brokertest.WithStartTimeout(context.WithoutCancel(ctx))
	defer cancel()
	s, err := newServer(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.process.Start(ctx, s.ping); err != nil {
		return nil, errors.Join(err, s.process.Close())
	}
	return s, nil
}

// Start starts a server of the caller's own on free ports. ctx governs the start
// alone. The caller calls Shutdown; if the process ends without it, the server ends
// too.
func Start(ctx context.Context) (*Broker, error) {
	s, err := newServer(ctx)
	if err != nil {
		return nil, err
	}
	b := &Broker{url: s.url, prefix: brokertest.Prefix(), refused: map[string]bool{}}
	b.Base, err = brokertest.NewBase(ctx, s.url.Host, brokertest.Engine{
		Start:  func(ctx context.Context) error { return s.process.Start(ctx, s.ping) },
		Kill:   func(context.Context) error { return s.process.Kill() },
		Remove: s.process.Close,
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Name implements [brokertest.Broker].
func (b *Broker) Name() string { return "rabbitmq" }

// Publisher implements [brokertest.Broker].
func (b *Broker) Publisher(logger watermill.LoggerAdapter) (message.Publisher, error) {
	u := *b.url
	u.Host = b.Proxy().Addr()
	return Connect(brokertest.JoinAddress(u.String(), b.prefix), logger)
}

// Address implements [brokertest.Broker].
func (b *Broker) Address() string { return brokertest.JoinAddress(b.url.String(), b.prefix) }

// Connect returns a publisher to the broker at an Address.
func Connect(address string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	server, prefix := brokertest.SplitAddress(address)
	publisher, err := NewPublisher(server, logger)
	if err != nil {
		return nil, err
	}
	return brokertest.Prefixed{Publisher: publisher, Prefix: prefix}, nil
}

// MaxPayload implements [brokertest.Broker]. It is not known of a named server.
func (b *Broker) MaxPayload() int {
	if !b.Owned() && os.Getenv(EnvURL) != "" {
		return 0
	}
	return maxPayload
}

// NewPublisher returns a publisher of persistent messages that waits for the
// confirmation of each. It keeps the order of what one goroutine publishes.
func NewPublisher(uri string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	config := wmamqp.NewDurableQueueConfig(uri)
	config.Publish.ConfirmDelivery = true
	// A channel for each call of Publish. A pool loses a channel whenever it finds it
	// closed and can't open it again at once, and when it has lost all, Publish waits
	// for ever.
	config.Publish.ChannelPoolSize = 0
	config.Connection.AmqpConfig = &amqp.Config{
		Heartbeat: brokertest.PublishTimeout, Locale: "en_US",
		Dial: amqp.DefaultDial(brokertest.PublishTimeout),
	}
	// By default the pause grows to a minute.
	config.Connection.Reconnect = &wmamqp.ReconnectConfig{
		BackoffInitialInterval: brokertest.ReconnectInterval, BackoffMaxInterval: brokertest.ReconnectInterval,
		BackoffMultiplier: 1,
	}
	return wmamqp.NewPublisher(config, brokertest.OrNop(logger))
}

// Declare implements [brokertest.Broker]: it makes a durable queue for each topic.
// What is published to others is confirmed and lost: the publisher does not listen
// to what the broker returns.
func (b *Broker) Declare(ctx context.Context, topics ...string) error {
	return b.Do(ctx, func(channel *amqp.Channel) error {
		for _, topic := range topics {
			if err := b.queue(channel, topic, false); err != nil {
				return err
			}
		}
		return nil
	})
}

// Refuse implements [brokertest.Broker]: the queue is full with no message in it, and
// says so of each.
func (b *Broker) Refuse(ctx context.Context, topic string) error {
	return b.Do(ctx, func(channel *amqp.Channel) error { return b.queue(channel, topic, true) })
}

// queue makes the queue of a topic, or makes it anew if it is to be another than it is.
func (b *Broker) queue(channel *amqp.Channel, topic string, refuses bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if refuses != b.refused[topic] {
		if _, err := channel.QueueDelete(b.Queue(topic), false, false, false); err != nil {
			return fmt.Errorf("rabbitmq: delete the queue of %s: %w", topic, err)
		}
	}
	var arguments amqp.Table
	if refuses {
		arguments = amqp.Table{amqp.QueueMaxLenArg: 0, amqp.QueueOverflowArg: amqp.QueueOverflowRejectPublish}
	}
	if _, err := channel.QueueDeclare(b.Queue(topic), true, false, false, false, arguments); err != nil {
		return fmt.Errorf("rabbitmq: make a queue for %s: %w", topic, err)
	}
	b.refused[topic] = refuses
	b.declared = time.Now()
	b.topics = append(b.topics, b.Queue(topic))
	return nil
}

// Queue returns the name of a topic's queue.
func (b *Broker) Queue(topic string) string { return b.prefix + topic }

// Received implements [brokertest.Broker]. It gets the messages and does not ack
// them, so that the broker puts them back where they were. Two at a time for the same
// topic see a part each.
func (b *Broker) Received(ctx context.Context, topic string) ([]*message.Message, error) {
	var messages []*message.Message
	err := b.Do(ctx, func(channel *amqp.Channel) error {
		for {
			delivery, ok, err := channel.Get(b.Queue(topic), false)
			if err != nil || !ok {
				return err
			}
			msg, err := wmamqp.DefaultMarshaler{}.Unmarshal(delivery)
			if err != nil {
				return err
			}
			messages = append(messages, msg)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("rabbitmq: messages of %s: %w", topic, err)
	}
	return messages, nil
}

// Do calls do with a channel to the server, past the Proxy.
func (b *Broker) Do(ctx context.Context, do func(*amqp.Channel) error) (err error) {
	conn, err := dial(ctx, b.url)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := conn.Close(); closeErr != nil && !errors.Is(closeErr, amqp.ErrClosed) {
			err = errors.Join(err, closeErr)
		}
	}()
	channel, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(channel)
}

func (b *Broker) ping(ctx context.Context) error {
	return b.Do(ctx, func(*amqp.Channel) error { return nil })
}

// forget deletes the declared topics.
func (b *Broker) forget() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.topics) == 0 {
		return nil
	}
	ctx, cancel := brokertest.WithStartTimeout(context.Background())
	defer cancel()
	return b.Do(ctx, func(channel *amqp.Channel) error {
		for _, queue := range b.topics {
			if _, err := channel.QueueDelete(queue, false, false, false); err != nil {
				return fmt.Errorf("rabbitmq: delete queue %s: %w", queue, err)
			}
		}
		return nil
	})
}

// dial connects to a server within ctx.
func dial(ctx context.Context, u *url.URL) (*amqp.Connection, error) {
	conn, err := amqp.DialConfig(u.String(), amqp.Config{
		Heartbeat: 10 * time.Second, Locale: "en_US",
		Dial: func(network, addr string) (net.Conn, error) {
			dialer := net.Dialer{Timeout: brokertest.PublishTimeout}
			conn, err := dialer.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			// Of the handshake; the library takes it away afterwards.
			return conn, conn.SetDeadline(time.Now().Add(2 * brokertest.PublishTimeout))
		},
	})
	if err != nil {
		return nil, fmt.Errorf("rabbitmq: connect: %w", err)
	}
	return conn, nil
}
