package main

import (
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmamqp "github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	// heartbeat is how often each side shows that it is there. A connection without two
	// of them is given up, and with it what waits for a confirmation.
	heartbeat = 2 * time.Second
	// reconnectInterval is the pause between two attempts to connect.
	reconnectInterval = 100 * time.Millisecond
)

// newPublisher returns a publisher of persistent messages to durable queues that waits
// for the confirmation of each.
func newPublisher(url string) (message.Publisher, error) {
	config := wmamqp.NewDurableQueueConfig(url)
	// By default Publish returns when the message is written to the connection.
	config.Publish.ConfirmDelivery = true
	// A channel for each call. A pool loses one whenever it finds it closed and can't
	// open it again at once, and when it has lost all, Publish waits for ever.
	config.Publish.ChannelPoolSize = 0
	config.Connection.AmqpConfig = &amqp.Config{Heartbeat: heartbeat, Locale: "en_US"}
	// By default the pause grows to a minute.
	config.Connection.Reconnect = &wmamqp.ReconnectConfig{
		BackoffInitialInterval: reconnectInterval, BackoffMaxInterval: reconnectInterval, BackoffMultiplier: 1,
	}
	return wmamqp.NewPublisher(config, watermill.NopLogger{})
}
