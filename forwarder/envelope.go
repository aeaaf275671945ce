package forwarder

import (
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/envelope"
)

// unwrap and wrap read and write the envelopes of Watermill's own forwarder.
func unwrap(msg *message.Message) (topic string, inner *message.Message, err error) {
	return envelope.Unwrap(msg)
}

func wrap(topic string, msg *message.Message) (*message.Message, error) {
	return envelope.Wrap(topic, msg)
}
