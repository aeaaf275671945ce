// Package redis is a Redis server for tests: a program of the machine, or the
// server named by OUTBOX_TEST_REDIS_URL. Each topic is a stream.
//
// A server of ours writes each command to its append-only file, with fsync, before
// it answers. Kill is SIGKILL.
//
// What the publisher does when something is wrong is go-redis's doing, with the
// settings of [NewPublisher]:
//
//   - the broker is away: a *net.OpError of dialling, at once;
//   - a connection is cut: a *net.OpError, or io.EOF, and the message may be in the
//     stream;
//   - a confirmation does not come: a net.Error whose Timeout is true, after
//     PublishTimeout;
//   - the server refuses the command: a redis.Error, whose text begins with a code
//     such as READONLY, OOM, NOREPLICAS, MISCONF, LOADING or WRONGTYPE.
package redis

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// EnvURL is the environment variable that names a server to use, as a redis:// URL.
const EnvURL = "OUTBOX_TEST_REDIS_URL"

// Broker is a Redis server.
type Broker struct {
	*brokertest.Base

	options *redis.Options // of connections past the Proxy
	prefix  string

	mu     sync.Mutex
	topics []string
}

var _ brokertest.Broker = (*Broker)(nil)

// Open returns the server named by OUTBOX_TEST_REDIS_URL, or one from Start.
func Open(ctx context.Context) (*Broker, error) {
	given := os.Getenv(EnvURL)
	if given == "" {
		return Start(ctx)
	}
	options, err := redis.ParseURL(given)
	if err != nil {
		// The text of the error may have the password.
		return nil, fmt.Errorf("redis: %s is not the URL of a server; it should look like redis://user:password@host:6379/0", EnvURL)
	}
	b := &Broker{options: options, prefix: brokertest.Prefix()}
	if err := b.ping(ctx); err != nil {
		return nil, fmt.Errorf("redis: the server named by %s does not answer: %w", EnvURL, err)
	}
	b.Base, err = brokertest.NewBase(ctx, options.Addr, brokertest.Engine{Remove: b.forget})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Start starts a server on a free port. ctx governs the start alone. The caller
// calls Shutdown; if the process ends without it, the server ends too.
func Start(ctx context.Context) (*Broker, error) {
	program, err := brokertest.Program("redis-server", "redis-server", EnvURL)
	if err != nil {
		return nil, err
	}
	ports, err := brokertest.FreePorts(ctx, 1)
	if err != nil {
		return nil, err
	}
	process, err := brokertest.NewProcess(map[string]string{
		"start.sh": "exec " + brokertest.Quote(program) + " ./redis.conf\n",
		"redis.conf": fmt.Sprintf(`port %d
bind 127.0.0.1
appendonly yes
appendfsync always
save ""
`, ports[0]),
	})
	if err != nil {
		return nil, err
	}
	b := &Broker{options: &redis.Options{Addr: brokertest.Local(ports[0])}, prefix: brokertest.Prefix()}
	b.Base, err = brokertest.NewBase(ctx, b.options.Addr, brokertest.Engine{
		Start:  func(ctx context.Context) error { return process.Start(ctx, b.ping) },
		Kill:   func(context.Context) error { return process.Kill() },
		Remove: process.Close,
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Name implements [brokertest.Broker].
func (b *Broker) Name() string { return "redis" }

// Publisher implements [brokertest.Broker].
func (b *Broker) Publisher(logger watermill.LoggerAdapter) (message.Publisher, error) {
	options := *b.options
	options.Addr = b.Proxy().Addr()
	return prefixed(options, b.prefix, logger)
}

func prefixed(options redis.Options, prefix string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	publisher, err := NewPublisher(options, logger)
	if err != nil {
		return nil, err
	}
	return brokertest.Prefixed{Publisher: publisher, Prefix: prefix}, nil
}

// Address implements [brokertest.Broker].
func (b *Broker) Address() string {
	u := url.URL{Scheme: "redis", Host: b.options.Addr, Path: "/" + strconv.Itoa(b.options.DB)}
	if b.options.Password != "" {
		u.User = url.UserPassword(b.options.Username, b.options.Password)
	}
	if b.options.TLSConfig != nil {
		u.Scheme = "rediss"
	}
	return brokertest.JoinAddress(u.String(), b.prefix)
}

// Connect returns a publisher to the broker at an Address.
func Connect(address string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	server, prefix := brokertest.SplitAddress(address)
	options, err := redis.ParseURL(server)
	if err != nil {
		return nil, errors.New("redis: an address is not one of Broker.Address") // the text of the error may have the password
	}
	return prefixed(*options, prefix, logger)
}

// MaxPayload implements [brokertest.Broker]. Redis has a limit of 512 MB, and ends the
// connection of who exceeds it.
func (b *Broker) MaxPayload() int { return 0 }

// NewPublisher returns a publisher that waits for the answer to each message. It
// keeps the order of what one goroutine publishes. The end of the message's context
// ends the wait.
func NewPublisher(options redis.Options, logger watermill.LoggerAdapter) (message.Publisher, error) {
	// By default go-redis repeats a command up to three times whose answer did not
	// come, and so puts a message into the stream more than once.
	options.MaxRetries = -1
	options.DialTimeout = brokertest.PublishTimeout
	options.ReadTimeout = brokertest.PublishTimeout
	options.WriteTimeout = brokertest.PublishTimeout
	options.ContextTimeoutEnabled = true
	return redisstream.NewPublisher(redisstream.PublisherConfig{Client: redis.NewClient(&options)}, brokertest.OrNop(logger))
}

// Declare implements [brokertest.Broker]. Redis makes streams by itself; it is noted
// for Shutdown.
func (b *Broker) Declare(ctx context.Context, topics ...string) error {
	b.note(topics...)
	return b.Do(func(client *redis.Client) error {
		for _, topic := range topics {
			kind, err := client.Type(ctx, b.prefix+topic).Result()
			if err == nil && kind == "string" { // it was refused
				err = client.Del(ctx, b.prefix+topic).Err()
			}
			if err != nil {
				return fmt.Errorf("redis: make room for %s: %w", topic, err)
			}
		}
		return nil
	})
}

// Refuse implements [brokertest.Broker]: the key is no stream, and the answer to what
// is added to it WRONGTYPE.
func (b *Broker) Refuse(ctx context.Context, topic string) error {
	b.note(topic)
	return b.Do(func(client *redis.Client) error { return client.Set(ctx, b.prefix+topic, "refused", 0).Err() })
}

func (b *Broker) note(topics ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, topic := range topics {
		b.topics = append(b.topics, b.prefix+topic)
	}
}

// Received implements [brokertest.Broker].
func (b *Broker) Received(ctx context.Context, topic string) ([]*message.Message, error) {
	var messages []*message.Message
	err := b.Do(func(client *redis.Client) error {
		entries, err := client.XRange(ctx, b.prefix+topic, "-", "+").Result()
		if err != nil {
			return err
		}
		for _, entry := range entries {
			msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(entry.Values)
			if err != nil {
				return fmt.Errorf("entry %s: %w", entry.ID, err)
			}
			messages = append(messages, msg)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("redis: messages of %s: %w", topic, err)
	}
	return messages, nil
}

// Do calls do with a connection to the server, past the Proxy.
func (b *Broker) Do(do func(*redis.Client) error) (err error) {
	options := *b.options
	client := redis.NewClient(&options)
	defer func() { err = errors.Join(err, client.Close()) }()
	return do(client)
}

func (b *Broker) ping(ctx context.Context) error {
	return b.Do(func(client *redis.Client) error { return client.Ping(ctx).Err() })
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
	return b.Do(func(client *redis.Client) error { return client.Del(ctx, b.topics...).Err() })
}
