package main

import (
	"testing"

	"github.com/millrace/watermill-outbox/examples/internal/forwarding/forwardingtest"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestForwardWebhook(t *testing.T) {
	t.Parallel()

	forwardingtest.Run(t, run, "connection refused")
}
