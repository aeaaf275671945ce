// Package rabbitmq gets the examples a RabbitMQ.
package rabbitmq

import (
	"cmp"
	"context"
	"net/url"
	"os"

	"github.com/millrace/watermill-outbox/examples/internal/broker"
	"github.com/millrace/watermill-outbox/internal/brokertest/rabbitmq"
)

// Open returns the server named by OUTBOX_TEST_RABBITMQ_URL, or one that is made of
// the machine's programs and ends with this process. Its address is an amqp:// URL. A
// start of RabbitMQ takes seconds, so it is not ended to take it away: its connections
// are.
func Open(ctx context.Context) (*broker.Broker, error) {
	b, err := rabbitmq.Open(ctx)
	if err != nil {
		return nil, err
	}
	return broker.New(b, func() (string, error) {
		// A server of ours lets everybody in who says nothing else than RabbitMQ's
		// defaults, as clients do for a URL without a user.
		u, err := url.Parse(cmp.Or(os.Getenv(rabbitmq.EnvURL), "amqp://localhost/"))
		if err != nil {
			return "", err
		}
		u.Host = b.Proxy().Addr()
		return u.String(), nil
	})
}
