// Package jetstream is a NATS server with JetStream in this process, for tests.
//
// Its data are in files. It is stopped like any server in a process, and not
// killed: Kill is no crash of a machine. Each topic is a stream of its own with
// one subject.
//
// What the publisher does when something is wrong is the NATS client's doing, with
// the settings of [NewPublisher]:
//
//   - the broker is away: nats.ErrReconnectBufExceeded at once, since nothing is
//     buffered, or nats.ErrConnectionClosed after Close;
//   - a confirmation does not come, also since the connection was cut: nats.ErrTimeout
//     after PublishTimeout, and the message may be in the stream;
//   - no stream has the topic: nats.ErrNoStreamResponse after half a second;
//   - the message is too big for the server: nats.ErrMaxPayload, from the client;
//   - the stream refuses it: *nats.APIError with the server's code.
package jetstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// Broker is a NATS server.
type Broker struct {
	*brokertest.Base

	options *server.Options

	mu     sync.Mutex
	server *server.Server // nil while it is down
}

var _ brokertest.Broker = (*Broker)(nil)

// Start starts a server on a free port. ctx governs the start alone. The caller
// calls Shutdown; without it, the folder of a killed process is left behind.
func Start(ctx context.Context) (*Broker, error) {
	ports, err := brokertest.FreePorts(ctx, 1)
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "brokertest.")
	if err != nil {
		return nil, fmt.Errorf("jetstream: make a folder: %w", err)
	}
	b := &Broker{options: &server.Options{
		ServerName: "brokertest", Host: "127.0.0.1", Port: ports[0], StoreDir: folder,
		JetStream: true, NoLog: true, NoSigs: true,
	}}
	b.Base, err = brokertest.NewBase(ctx, brokertest.Local(ports[0]), brokertest.Engine{
		Start: b.start, Kill: b.kill,
		Remove: func() error {
			err := b.kill(context.Background())
			if errors.Is(err, brokertest.ErrDown) {
				err = nil
			}
			return errors.Join(err, os.RemoveAll(folder))
		},
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Name implements [brokertest.Broker].
func (b *Broker) Name() string { return "jetstream" }

// URL returns the server's own URL, past the Proxy.
func (b *Broker) URL() string {
	return "nats://" + net.JoinHostPort(b.options.Host, fmt.Sprint(b.options.Port))
}

// Address implements [brokertest.Broker]: it is the URL.
func (b *Broker) Address() string { return b.URL() }

// Connect returns a publisher to the broker at an Address.
func Connect(address string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	return NewPublisher(address, logger)
}

// MaxPayload implements [brokertest.Broker]. It includes the metadata.
func (b *Broker) MaxPayload() int { return server.MAX_PAYLOAD_SIZE }

// Publisher implements [brokertest.Broker].
func (b *Broker) Publisher(logger watermill.LoggerAdapter) (message.Publisher, error) {
	return NewPublisher("nats://"+b.Proxy().Addr(), logger)
}

// NewPublisher returns a publisher that waits for the stream's confirmation of each
// message. It keeps the order of what one goroutine publishes. The message's
// context is not looked at.
func NewPublisher(url string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	logger = brokertest.OrNop(logger)
	return wmnats.NewPublisher(wmnats.PublisherConfig{
		URL: url,
		NatsOptions: []nats.Option{
			nats.MaxReconnects(-1), nats.ReconnectWait(brokertest.ReconnectInterval), nats.ReconnectJitter(0, 0),
			nats.Timeout(brokertest.PublishTimeout),
			// By default what is published while the broker is away waits in a
			// buffer, is reported as failed, and sent all the same later.
			nats.ReconnectBufSize(-1),
			// A stalled connection is given up after two of these.
			nats.PingInterval(brokertest.PublishTimeout), nats.MaxPingsOutstanding(1),
			// By default it writes to standard error.
			nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
				logger.Error("NATS connection", err, nil)
			}),
		},
		JetStream: wmnats.JetStreamConfig{
			ConnectOptions: []nats.JSOpt{nats.MaxWait(brokertest.PublishTimeout)},
			// It would ask for the stream before each message. See Declare.
			AutoProvision: false,
			// The stream would drop a second message of the same UUID in silence:
			// duplicates are to be seen.
			TrackMsgId: false,
		},
	}, logger)
}

// Declare implements [brokertest.Broker]: it makes a stream for each topic.
func (b *Broker) Declare(ctx context.Context, topics ...string) error {
	return b.Do(func(js nats.JetStreamContext) error {
		for _, topic := range topics {
			// The same stream again is no error.
			if _, err := js.AddStream(&nats.StreamConfig{Name: Stream(topic), Subjects: []string{topic}}, nats.Context(ctx)); err != nil {
				return fmt.Errorf("jetstream: make a stream for %s: %w", topic, err)
			}
		}
		return nil
	})
}

// Refuse implements [brokertest.Broker]: no stream has the topic.
func (b *Broker) Refuse(ctx context.Context, topic string) error {
	return b.Do(func(js nats.JetStreamContext) error {
		if err := js.DeleteStream(Stream(topic), nats.Context(ctx)); err != nil && !errors.Is(err, nats.ErrStreamNotFound) {
			return fmt.Errorf("jetstream: delete the stream of %s: %w", topic, err)
		}
		return nil
	})
}

// Stream returns the name of a topic's stream.
func Stream(topic string) string {
	return strings.NewReplacer(".", "_", "*", "_", ">", "_", " ", "_", "/", "_").Replace(topic)
}

// Received implements [brokertest.Broker].
func (b *Broker) Received(ctx context.Context, topic string) ([]*message.Message, error) {
	var messages []*message.Message
	err := b.Do(func(js nats.JetStreamContext) error {
		info, err := js.StreamInfo(Stream(topic), nats.Context(ctx))
		if err != nil {
			return err
		}
		if info.State.Msgs == 0 {
			return nil // the sequences of an empty stream mean nothing
		}
		for sequence := info.State.FirstSeq; sequence <= info.State.LastSeq; sequence++ {
			raw, err := js.GetMsg(Stream(topic), sequence, nats.Context(ctx))
			if errors.Is(err, nats.ErrMsgNotFound) {
				continue // deleted
			}
			if err != nil {
				return err
			}
			msg, err := new(wmnats.NATSMarshaler).Unmarshal(&nats.Msg{Header: raw.Header, Data: raw.Data})
			if err != nil {
				return err
			}
			if msg.Payload == nil {
				msg.Payload = []byte{}
			}
			messages = append(messages, msg)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("jetstream: messages of %s: %w", topic, err)
	}
	return messages, nil
}

// Do calls do with a connection to the server, past the Proxy. It returns
// [brokertest.ErrDown] while there is no server.
func (b *Broker) Do(do func(nats.JetStreamContext) error) error {
	b.mu.Lock()
	running := b.server
	b.mu.Unlock()
	if running == nil {
		return brokertest.ErrDown
	}
	conn, err := nats.Connect(b.URL(), nats.InProcessServer(running))
	if err != nil {
		return fmt.Errorf("jetstream: connect: %w", err)
	}
	defer conn.Close()
	js, err := conn.JetStream()
	if err != nil {
		return err
	}
	return do(js)
}

func (b *Broker) start(ctx context.Context) error {
	s, err := server.NewServer(b.options)
	if err != nil {
		return fmt.Errorf("jetstream: %w", err)
	}
	s.Start()
	patience := brokertest.PublishTimeout
	for !s.ReadyForConnections(patience) {
		if ctx.Err() != nil {
			s.Shutdown()
			s.WaitForShutdown()
			return fmt.Errorf("jetstream: the server is not ready: %w", context.Cause(ctx))
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.server = s
	return nil
}

func (b *Broker) kill(context.Context) error {
	b.mu.Lock()
	s := b.server
	b.server = nil
	b.mu.Unlock()
	if s == nil {
		return brokertest.ErrDown
	}
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}
