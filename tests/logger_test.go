package tests

import (
	"os"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
)

// testLogger logs to standard error with OUTBOX_TEST_LOG set, and nothing
// otherwise. It is not t.Log: the official suite leaves subscribers behind that
// log after their test has ended.
func testLogger(testing.TB) watermill.LoggerAdapter {
	if os.Getenv("OUTBOX_TEST_LOG") == "" {
		return watermill.NopLogger{}
	}
	return watermill.NewStdLogger(true, os.Getenv("OUTBOX_TEST_LOG") == "trace")
}
