package tests

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Somebody took all processes for dead and removed what they want: a sweep by a clock
// that had jumped ahead once did. They say it again, and share the shards as before;
// else one that has none would wait for ever.
func TestMembersThatWereRemovedComeBack(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for range 2 {
		f.subscribe(f.consumer(shortLease), outbox.SubscriberConfig{Shards: 4, CloseTimeout: -1}, "topic")
	}
	f.awaitEven("topic", 2)
	f.exec("DELETE FROM outbox.members")
	require.Eventually(t, func() bool { return f.number("SELECT count(*)::int FROM outbox.members") == 2 }, waitFor, 5*time.Millisecond)
	f.awaitEven("topic", 2)
}
