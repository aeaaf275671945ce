package main

import (
	"errors"
	"io"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/watermill-outbox/examples/internal/forwarding/forwardingtest"
	"github.com/millrace/watermill-outbox/forwarder"
)

// answer is what the server said.
type answer string

func (a answer) Error() string { return string(a) }
func (a answer) RedisError()   {}

var _ redis.Error = answer("")

func TestClassify(t *testing.T) {
	t.Parallel()

	forwardingtest.Classify(t, classify, map[error]forwarder.Fault{
		answer("LOADING the dataset"):         forwarder.FaultDestination,
		answer("OOM command not allowed"):     forwarder.FaultDestination,
		answer("WRONGTYPE no stream"):         forwarder.FaultDestination,
		answer("ERR Protocol error"):          forwarder.FaultUnknown,
		io.EOF:                                forwarder.FaultDestination,
		errors.New("LOADING, said by nobody"): forwarder.FaultUnknown,
	})
}
