// Package forwardingtest is what the tests of the examples of package forwarder have
// in common.
package forwardingtest

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/examples/internal/forwarding"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// Run runs an example and requires that all went well although the broker was away.
// failure is a part of the error that the example must have had meanwhile.
func Run(t *testing.T, example forwarding.Example, failure string) {
	t.Helper()
	var out strings.Builder
	r, err := example(t.Context(), pgtest.Pool(t, pgtest.Database(t)), &out)
	t.Logf("%s%s", &out, r)
	require.NoError(t, err)
	require.True(t, r.OK(), r)
	require.Contains(t, out.String(), failure)
}
