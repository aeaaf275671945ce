package forwarder

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Whether Done was asked for or not, an attempt's context ends for the same reasons.
func TestAttemptContext(t *testing.T) {
	t.Parallel()

	type key struct{}
	for name, test := range map[string]struct {
		end  func(cancelParent func(), c *attemptContext)
		want error
	}{
		"not at all": {func(func(), *attemptContext) {}, nil},
		"the parent": {func(cancel func(), _ *attemptContext) { cancel() }, context.Canceled},
		"the call":   {func(_ func(), c *attemptContext) { c.end() }, context.Canceled},
		"the time":   {func(func(), *attemptContext) { time.Sleep(time.Second) }, context.DeadlineExceeded},
	} {
		for _, asked := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					parent, cancelParent := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
					defer cancelParent()
					c := newAttemptContext(parent, time.Now().Add(time.Second))
					defer c.end()
					require.NoError(t, c.Err())
					require.Equal(t, "value", c.Value(key{}))
					deadline, ok := c.Deadline()
					require.True(t, ok)
					require.Equal(t, time.Now().Add(time.Second), deadline)
					if asked {
						require.NotNil(t, c.Done())
					}
					test.end(cancelParent, c)
					synctest.Wait()
					require.Equal(t, test.want, c.Err())
					select {
					case <-c.Done():
						require.Error(t, test.want)
					default:
						require.NoError(t, test.want)
					}
					require.Equal(t, test.want, c.Err())
					derived, cancel := context.WithCancel(c)
					defer cancel()
					synctest.Wait()
					require.Equal(t, test.want, derived.Err())
				})
			})
		}
	}
}
