package main

import (
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/watermill-outbox/forwarder"
)

// classify knows the answers of Redis: their first word is a code. A server that is not
// ready, full, read-only, or not allowed to answer us is at fault, and so is a key that
// is no stream, since all messages of that topic would fail. What is of the connection,
// forwarder.Classify knows.
func classify(err error) forwarder.Fault {
	var answer redis.Error
	if !errors.As(err, &answer) {
		return forwarder.Classify(err)
	}
	switch code, _, _ := strings.Cut(answer.Error(), " "); code {
	case "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "OOM", "MISCONF", "NOREPLICAS",
		"NOAUTH", "NOPERM", "WRONGPASS", "WRONGTYPE":
		return forwarder.FaultDestination
	}
	return forwarder.Classify(err)
}
