package main

import (
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
)

// answerTimeout is how long the server may take to acknowledge a message.
const answerTimeout = 2 * time.Second

// newPublisher returns a publisher that waits for the stream's acknowledgement of each
// message. The stream exists already. One that sends many before it waits is
// jetstream.NewPublisher in forwarder/jetstream; the forwarder uses it the same way.
func newPublisher(url string) (message.Publisher, error) {
	return wmnats.NewPublisher(wmnats.PublisherConfig{
		URL: url,
		NatsOptions: []nats.Option{
			nats.MaxReconnects(-1), nats.ReconnectWait(100 * time.Millisecond),
			// By default what is published while the server is away waits in a buffer. It
			// is reported as failed, and sent all the same later: behind its successors.
			nats.ReconnectBufSize(-1),
		},
		JetStream: wmnats.JetStreamConfig{
			ConnectOptions: []nats.JSOpt{nats.MaxWait(answerTimeout)},
			// The forwarder sets the id. The UUID that this would take need not be unique.
			TrackMsgId: false,
			// It would ask for the stream before each message.
			AutoProvision: false,
		},
	}, watermill.NopLogger{})
}
