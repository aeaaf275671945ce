package main

import (
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
)

// answerTimeout is how long the server may take to answer.
const answerTimeout = 2 * time.Second

// newPublisher returns a publisher that waits for the answer to each message. What an
// answer is worth is the server's setting: appendfsync always makes it mean that the
// message is on disk.
func newPublisher(url string) (message.Publisher, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	// By default go-redis repeats a command up to three times whose answer was lost, and
	// so puts a message into the stream up to four times. The forwarder repeats it, too,
	// but only once it knows that the server is up.
	options.MaxRetries = -1
	// By default the context of a message ends no wait.
	options.ContextTimeoutEnabled = true
	options.DialTimeout, options.ReadTimeout, options.WriteTimeout = answerTimeout, answerTimeout, answerTimeout
	return redisstream.NewPublisher(redisstream.PublisherConfig{Client: redis.NewClient(options)}, watermill.NopLogger{})
}
