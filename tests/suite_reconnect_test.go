//go:build !race

package tests

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"

	wmtests "github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/stretchr/testify/assert"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// TestWatermillSuiteReconnect is the part of Watermill's suite that restarts the
// server. It reads and appends to a slice of its own without synchronisation, so
// it cannot run under the race detector; TestReconnect does the same without.
func TestWatermillSuiteReconnect(t *testing.T) {
	f, server := newOwnFixture(t, pgtest.Options{})
	s := newSuite(t, f, testMode, outbox.OrderingStrict)
	restarts := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		assert.NoError(t, server.Restart(context.Background(), pgtest.Fast))
	}))
	t.Cleanup(restarts.Close)
	t.Setenv(childRestart, restarts.URL)

	features := suiteFeatures(false, outbox.OrderingStrict)
	features.RestartServiceCommand = []string{os.Args[0]}
	wmtests.TestReconnect(t, wmtests.TestContext{TestID: wmtests.NewTestID(), Features: features}, s.sharedGroup)
}

func init() {
	children[childRestart] = func() error {
		response, err := http.Get(os.Getenv(childRestart)) //nolint:noctx // a child process with nothing else to do
		if err != nil {
			return err
		}
		defer func() { _ = response.Body.Close() }()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("restart: %s", response.Status)
		}
		return nil
	}
}
