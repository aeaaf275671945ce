// Package tests holds the tests that need a database. They go through the
// public packages, and through internal ones where a guarantee is theirs. See
// the package documentation of internal/pgtest for where the database comes
// from.
package tests

import (
	"fmt"
	"os"
	"testing"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) {
	if os.Getenv(childURL) != "" {
		if err := consumeAsChild(); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	pgtest.Main(m)
}
