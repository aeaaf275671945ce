package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// awaitLive waits until the consumer and all its subscriptions read the WAL.
func awaitLive(t testing.TB, consumer *outbox.Consumer) {
	t.Helper()
	live := func() bool {
		status := consumer.Status()
		for _, sub := range status.Subscriptions {
			if sub.Source != outbox.SourceWAL {
				return false
			}
		}
		return status.Source == outbox.SourceWAL && len(status.Subscriptions) > 0
	}
	if !assert.Eventually(t, live, waitFor, 2*time.Millisecond) {
		require.FailNow(t, "the WAL is not read", "%+v", consumer.Status())
	}
}

// awaitPolling waits until the consumer says that it polls, for a reason with
// this text in it.
func awaitPolling(t testing.TB, consumer *outbox.Consumer, reason string) {
	t.Helper()
	polls := func() bool {
		status := consumer.Status()
		return status.Source == outbox.SourceTable && strings.Contains(status.Reason, reason)
	}
	if !assert.Eventually(t, polls, waitFor, 2*time.Millisecond) {
		require.FailNow(t, "messages are not polled for this reason", "%q: %+v", reason, consumer.Status())
	}
}
