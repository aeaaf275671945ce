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
		answer("LOADING Redis is loading the dataset in memory"):                              forwarder.FaultDestination,
		answer("OOM command not allowed when used memory > 'maxmemory'."):                     forwarder.FaultDestination,
		answer("WRONGTYPE Operation against a key holding the wrong kind of value"):           forwarder.FaultDestination,
		answer("ERR Protocol error"):                                                          forwarder.FaultUnknown,
		io.EOF:                                                                                forwarder.FaultDestination,
		errors.New("LOADING is the first word of something that the server did not say here"): forwarder.FaultUnknown,
	})
}
