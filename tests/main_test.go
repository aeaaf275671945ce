// Package tests holds the tests that need a database. They go through the
// public packages, and through internal ones where a guarantee is theirs. See
// the package documentation of internal/pgtest for where the database comes
// from.
package tests

import (
	"testing"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
