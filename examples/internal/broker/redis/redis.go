// Package redis gets the examples a Redis.
package redis

import (
	"cmp"
	"context"
	"net/url"
	"os"

	"github.com/millrace/watermill-outbox/examples/internal/broker"
	"github.com/millrace/watermill-outbox/internal/brokertest/redis"
)

// local is how servers of ours let clients in.
const local = "redis://localhost/0"

// Open returns the server named by OUTBOX_TEST_REDIS_URL, or one that is made of the
// machine's programs. Its address is a redis:// URL.
func Open(ctx context.Context) (*broker.Broker, error) {
	b, err := redis.Open(ctx)
	if err != nil {
		return nil, err
	}
	return broker.New(b, func() (string, error) {
		u, err := url.Parse(cmp.Or(os.Getenv(redis.EnvURL), local))
		if err != nil {
			return "", err
		}
		u.Host = b.Proxy().Addr()
		return u.String(), nil
	})
}
