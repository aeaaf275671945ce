package forwardingtest

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/forwarder"
)

// Classify requires faults of errors as they come from a publisher, which wraps them.
func Classify(t *testing.T, classify func(error) forwarder.Fault, faults map[error]forwarder.Fault) {
	t.Helper()
	for err, fault := range faults {
		wrapped := fmt.Errorf("forwarder: publish: %w", fmt.Errorf("cannot publish: %w", err))
		require.Equal(t, fault, classify(wrapped), err.Error())
	}
}
