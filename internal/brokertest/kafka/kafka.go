// Package kafka is a cluster that speaks the Kafka protocol, for tests: franz-go's
// kfake with one broker in this process, or the cluster named by
// OUTBOX_TEST_KAFKA_BROKERS.
//
// kfake's data are in files, written with fsync before it answers. It is stopped
// like any server in a process, and not killed.
//
// What the publisher does when something is wrong is sarama's doing, with the
// settings of [Options.NewPublisher]:
//
//   - the broker is away: sarama.ErrOutOfBrokers, with a *net.OpError within;
//   - a connection is cut: a *net.OpError, or io.EOF, and the message may be in the
//     topic;
//   - a confirmation does not come: a net.Error whose Timeout is true;
//   - the message is too big for the client: sarama.ConfigurationError;
//   - the broker refuses: sarama.KError, the protocol's error code.
package kafka

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	wmkafka "github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// EnvBrokers is the environment variable that names a cluster to use, as addresses
// with commas between them.
const EnvBrokers = "OUTBOX_TEST_KAFKA_BROKERS"

// partitions is how many a topic has.
const partitions = 3

// Options says what the publishers do.
type Options struct {
	// KeyMetadata is the name of the metadata whose value chooses the partition, so
	// that messages with the same one keep their order. Messages without it go to the
	// partition of the empty value. Defaults to "partition_key", the outbox's.
	KeyMetadata string
}

// Broker is a cluster.
type Broker struct {
	*brokertest.Base

	options Options
	brokers []string // past the Proxy
	prefix  string

	mu      sync.Mutex
	topics  []string
	cluster *kfake.Cluster // nil while it is down, and if it is not ours
}

var _ brokertest.Broker = (*Broker)(nil)

// Open returns the cluster named by OUTBOX_TEST_KAFKA_BROKERS, or one from Start.
func Open(ctx context.Context, o Options) (*Broker, error) {
	given := os.Getenv(EnvBrokers)
	if given == "" {
		return Start(ctx, o)
	}
	b := &Broker{options: o.withDefaults(), brokers: strings.Split(given, ","), prefix: brokertest.Prefix()}
	if err := b.Do(func(sarama.Client) error { return nil }); err != nil {
		return nil, fmt.Errorf("kafka: the cluster named by %s does not answer: %w", EnvBrokers, err)
	}
	var err error
	b.Base, err = brokertest.NewBase(ctx, b.brokers[0], brokertest.Engine{Remove: b.forget})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Start starts a cluster of one broker on a free port. ctx governs the start alone.
// The caller calls Shutdown; without it, the folder of a killed process is left
// behind.
func Start(ctx context.Context, o Options) (*Broker, error) {
	ports, err := brokertest.FreePorts(ctx, 1)
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "brokertest.")
	if err != nil {
		return nil, fmt.Errorf("kafka: make a folder: %w", err)
	}
	b := &Broker{options: o.withDefaults(), brokers: []string{brokertest.Local(ports[0])}, prefix: brokertest.Prefix()}
	b.Base, err = brokertest.NewBase(ctx, b.brokers[0], brokertest.Engine{
		Start: func(context.Context) error {
			cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.Ports(ports[0]), kfake.DataDir(folder), kfake.SyncWrites())
			if err != nil {
				return fmt.Errorf("kafka: start the cluster: %w", err)
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			b.cluster = cluster
			return nil
		},
		Kill: func(context.Context) error { return b.kill() },
		Remove: func() error {
			err := b.kill()
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

func (o Options) withDefaults() Options {
	if o.KeyMetadata == "" {
		o.KeyMetadata = "partition_key"
	}
	return o
}

// Name implements [brokertest.Broker].
func (b *Broker) Name() string { return "kafka" }

// Cluster returns the cluster in this process, to make it fail by its own means; nil
// while it is down, and if the cluster is another one. StartAgain makes a new one.
func (b *Broker) Cluster() *kfake.Cluster {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cluster
}

// Publisher implements [brokertest.Broker].
func (b *Broker) Publisher(logger watermill.LoggerAdapter) (message.Publisher, error) {
	config := Config()
	// Clients learn the brokers' addresses from the brokers.
	config.Net.Proxy.Enable = true
	config.Net.Proxy.Dialer = b.Proxy()
	return b.options.prefixed(b.brokers, b.prefix, config, logger)
}

func (o Options) prefixed(brokers []string, prefix string, config *sarama.Config, logger watermill.LoggerAdapter) (message.Publisher, error) {
	publisher, err := o.NewPublisher(brokers, config, logger)
	if err != nil {
		return nil, err
	}
	return brokertest.Prefixed{Publisher: publisher, Prefix: prefix}, nil
}

// Address implements [brokertest.Broker].
func (b *Broker) Address() string {
	return brokertest.JoinAddress(strings.Join(b.brokers, ","), b.prefix)
}

// Connect returns a publisher to the broker at an Address.
func (o Options) Connect(address string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	servers, prefix := brokertest.SplitAddress(address)
	return o.prefixed(strings.Split(servers, ","), prefix, Config(), logger)
}

// MaxPayload implements [brokertest.Broker]. It is that of the client, and includes the
// metadata.
func (b *Broker) MaxPayload() int { return Config().Producer.MaxMessageBytes }

// Config returns the settings of a publisher for [Options.NewPublisher].
func Config() *sarama.Config {
	config := wmkafka.DefaultSaramaSyncPublisherConfig()
	config.Producer.RequiredAcks = sarama.WaitForAll
	// One request at a time, not repeated: with more, a repeated one comes after its
	// successors.
	config.Net.MaxOpenRequests = 1
	config.Producer.Retry.Max = 0
	config.Producer.Timeout = brokertest.PublishTimeout
	config.Net.DialTimeout = brokertest.PublishTimeout
	config.Net.ReadTimeout = brokertest.PublishTimeout
	config.Net.WriteTimeout = brokertest.PublishTimeout
	// Watermill's is 2 s, three times, for each topic of a broker that is away.
	config.Metadata.Retry.Max = 1
	config.Metadata.Retry.Backoff = brokertest.ReconnectInterval
	return config
}

// NewPublisher returns a publisher that waits until all replicas in sync have each
// message. Messages of the same key keep the order in which one goroutine publishes
// them. The message's context is not looked at.
func (o Options) NewPublisher(brokers []string, config *sarama.Config, logger watermill.LoggerAdapter) (message.Publisher, error) {
	key := o.withDefaults().KeyMetadata
	return wmkafka.NewPublisher(wmkafka.PublisherConfig{
		Brokers: brokers,
		Marshaler: wmkafka.NewWithPartitioningMarshaler(func(_ string, msg *message.Message) (string, error) {
			return msg.Metadata.Get(key), nil
		}),
		OverwriteSaramaConfig: config,
	}, brokertest.OrNop(logger))
}

// Declare implements [brokertest.Broker].
func (b *Broker) Declare(_ context.Context, topics ...string) error {
	return b.admin(func(admin sarama.ClusterAdmin) error {
		for _, topic := range topics {
			err := admin.CreateTopic(b.Topic(topic), &sarama.TopicDetail{NumPartitions: partitions, ReplicationFactor: 1}, false)
			if err != nil && !errors.Is(err, sarama.ErrTopicAlreadyExists) {
				return fmt.Errorf("kafka: make topic %s: %w", topic, err)
			}
			b.mu.Lock()
			b.topics = append(b.topics, b.Topic(topic))
			b.mu.Unlock()
		}
		return nil
	})
}

// Refuse implements [brokertest.Broker]: there is no such topic.
func (b *Broker) Refuse(_ context.Context, topic string) error {
	return b.admin(func(admin sarama.ClusterAdmin) error {
		if err := admin.DeleteTopic(b.Topic(topic)); err != nil && !errors.Is(err, sarama.ErrUnknownTopicOrPartition) {
			return fmt.Errorf("kafka: delete topic %s: %w", topic, err)
		}
		return nil
	})
}

// Topic returns the name that a topic has in the cluster.
func (b *Broker) Topic(topic string) string { return b.prefix + topic }

// Received implements [brokertest.Broker]: one partition after the other.
func (b *Broker) Received(ctx context.Context, topic string) ([]*message.Message, error) {
	var messages []*message.Message
	err := b.Do(func(client sarama.Client) error {
		list, err := client.Partitions(b.Topic(topic))
		if err != nil {
			return err
		}
		for _, partition := range list {
			part, err := receive(ctx, client, b.Topic(topic), partition)
			if err != nil {
				return fmt.Errorf("partition %d: %w", partition, err)
			}
			messages = append(messages, part...)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("kafka: messages of %s: %w", topic, err)
	}
	return messages, nil
}

// receive returns what is in a partition now.
func receive(ctx context.Context, client sarama.Client, topic string, partition int32) (_ []*message.Message, err error) {
	first, err := client.GetOffset(topic, partition, sarama.OffsetOldest)
	if err != nil {
		return nil, err
	}
	next, err := client.GetOffset(topic, partition, sarama.OffsetNewest)
	if err != nil || first >= next {
		return nil, err
	}
	consumer, err := sarama.NewConsumerFromClient(client)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, consumer.Close()) }()
	records, err := consumer.ConsumePartition(topic, partition, first)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, records.Close()) }()
	var messages []*message.Message
	for {
		select {
		case record := <-records.Messages():
			msg, err := wmkafka.DefaultMarshaler{}.Unmarshal(record)
			if err != nil {
				return nil, fmt.Errorf("offset %d: %w", record.Offset, err)
			}
			if msg.Payload == nil {
				msg.Payload = []byte{} // a record without a value
			}
			messages = append(messages, msg)
			if record.Offset >= next-1 {
				return messages, nil
			}
		case err := <-records.Errors():
			return nil, err
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Do calls do with a client of the cluster, past the Proxy.
func (b *Broker) Do(do func(sarama.Client) error) (err error) {
	config := sarama.NewConfig()
	config.Version = sarama.V2_0_0_0
	config.Consumer.Return.Errors = true
	client, err := sarama.NewClient(b.brokers, config)
	if err != nil {
		return fmt.Errorf("kafka: connect: %w", err)
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	return do(client)
}

func (b *Broker) admin(do func(sarama.ClusterAdmin) error) (err error) {
	config := sarama.NewConfig()
	config.Version = sarama.V2_0_0_0
	admin, err := sarama.NewClusterAdmin(b.brokers, config)
	if err != nil {
		return fmt.Errorf("kafka: connect: %w", err)
	}
	defer func() { err = errors.Join(err, admin.Close()) }()
	return do(admin)
}

func (b *Broker) kill() error {
	b.mu.Lock()
	cluster := b.cluster
	b.cluster = nil
	b.mu.Unlock()
	if cluster == nil {
		return brokertest.ErrDown
	}
	cluster.Close()
	return nil
}

// forget deletes the declared topics.
func (b *Broker) forget() error {
	b.mu.Lock()
	topics := b.topics
	b.mu.Unlock()
	if len(topics) == 0 {
		return nil
	}
	return b.admin(func(admin sarama.ClusterAdmin) error {
		var errs []error
		for _, topic := range topics {
			if err := admin.DeleteTopic(topic); !errors.Is(err, sarama.ErrUnknownTopicOrPartition) {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
}
