package tests

import (
	"bytes"
	"context"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
)

// publishIn publishes messages in a transaction, by way of their contexts.
func publishIn(ctx context.Context, publisher *outbox.Publisher, tx any, topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		msg.SetContext(outbox.ContextWithTx(ctx, tx))
	}
	return publisher.Publish(topic, messages...)
}

// withMetadata returns a message with this content.
func withMetadata(uuid string, payload []byte, metadata message.Metadata) *message.Message {
	msg := message.NewMessage(uuid, payload)
	msg.Metadata = metadata
	return msg
}

// content is what Publish must not change, and what must arrive.
type content struct {
	UUID     string
	Metadata message.Metadata
	Payload  message.Payload
}

// contents returns copies, independent of the messages.
func contents(messages []*message.Message) []content {
	list := make([]content, len(messages))
	for i, msg := range messages {
		list[i] = content{UUID: msg.UUID, Metadata: maps.Clone(msg.Metadata), Payload: bytes.Clone(msg.Payload)}
	}
	return list
}
