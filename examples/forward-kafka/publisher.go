package main

import (
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	wmkafka "github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	// answerTimeout is how long a broker may take to answer.
	answerTimeout = 2 * time.Second
	// metadataPause is the pause before a client asks for the brokers again.
	metadataPause = 100 * time.Millisecond
)

// newPublisher returns a publisher that waits until all replicas in sync have a message.
// The messages of an ordering key go to one partition, where they keep their order.
func newPublisher(brokers ...string) (message.Publisher, error) {
	config := wmkafka.DefaultSaramaSyncPublisherConfig()
	config.Producer.RequiredAcks = sarama.WaitForAll
	// By default a request is repeated up to ten times, while up to four others are on
	// the way that may overtake it. The forwarder repeats, too.
	config.Producer.Retry.Max = 0
	config.Net.MaxOpenRequests = 1
	config.Producer.Timeout = answerTimeout
	config.Net.DialTimeout, config.Net.ReadTimeout, config.Net.WriteTimeout = answerTimeout, answerTimeout, answerTimeout
	// By default three times, with 2 s between them, for each topic of a cluster that is
	// away.
	config.Metadata.Retry.Max, config.Metadata.Retry.Backoff = 1, metadataPause
	return wmkafka.NewPublisher(wmkafka.PublisherConfig{
		Brokers: brokers,
		Marshaler: wmkafka.NewWithPartitioningMarshaler(func(_ string, msg *message.Message) (string, error) {
			return msg.Metadata.Get(outbox.DefaultKeyMetadata), nil
		}),
		OverwriteSaramaConfig: config,
	}, watermill.NopLogger{})
}
