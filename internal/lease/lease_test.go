package lease

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/cursor"
)

// The answer to a beat came just before the leases ran out, and was noted just after.
// A worker that had looked in between had left its message, and its line, for good,
// and the lease went on.
func TestALeaseThatWasNotValidIsLost(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		m := New(nil, nil, nil, Config{Duration: 10 * time.Second})
		renew := func() { m.validUntil.Store(int64(time.Since(m.started) + 8*time.Second)) }
		ctx, lose := context.WithCancelCause(t.Context())
		l := &Lease{Key: cursor.Key{Group: "g", Topic: "t"}, manager: m, ctx: ctx, lose: lose}
		renew()
		require.True(t, l.Valid())
		time.Sleep(7 * time.Second)
		renew()
		require.True(t, l.Valid())
		time.Sleep(8 * time.Second)
		require.False(t, l.Valid())
		renew()
		require.False(t, l.Valid())
		require.ErrorIs(t, context.Cause(l.Context()), ErrLost)
	})
}
