package brokertest

import "github.com/ThreeDotsLabs/watermill/message"

// Prefixed is a publisher that publishes to topics with a prefix.
type Prefixed struct {
	message.Publisher
	Prefix string
}

var _ message.Publisher = Prefixed{}

// Publish publishes to the topic with the prefix in front of it. Context, errors
// and concurrency are those of the publisher within.
func (p Prefixed) Publish(topic string, messages ...*message.Message) error {
	return p.Publisher.Publish(p.Prefix+topic, messages...)
}
