package tests

import (
	"context"
	"net"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// For a moment an address led to a standby. The pool kept connections to it,
// which answer, if only with errors, and the topics stood still long after the
// address was right again, held by a process whose beat was fine.
func TestAddressThatLeadsToAStandbyForAWhile(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{})
	standby, err := server.Standby(t.Context(), pgtest.Options{})
	require.NoError(t, err)
	pgtest.Cleanup(t, standby)
	f := fixtureAt(t, server.URL())
	var address atomic.Value
	address.Store(server.Addr())
	var toStandby atomic.Int64
	db := f.pool.Config()
	db.ConnConfig.DialFunc = func(ctx context.Context, network, _ string) (net.Conn, error) {
		to := address.Load().(string)
		if to == standby.Addr() {
			toStandby.Add(1)
		}
		return new(net.Dialer).DialContext(ctx, network, to)
	}
	_, messages := f.subscribe(f.consumerOn(db, nil), outbox.SubscriberConfig{}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})
	require.NoError(t, publisher.Publish("topic", newMessages(1)...))
	receive(t, messages, 1)

	address.Store(standby.Addr())
	f.exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name = 'watermill-outbox'")
	require.Eventually(t, func() bool { return toStandby.Load() > 5 }, waitFor, 5*time.Millisecond)
	address.Store(server.Addr())
	sent := newMessages(1)
	require.NoError(t, publisher.Publish("topic", sent...))
	require.Equal(t, uuids(sent), uuids(receive(t, messages, 1)))
}

// The data folder was put back to the copy of an earlier clean stop while the
// consumer lived on. Nothing says that it is another life: the cluster is the
// same and the marker survives a clean stop. But the server is older than the
// position in memory, and a window from there to now took what committed since
// for handed out.
func TestServerPutBackToAnOlderCopy(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{})
	f := fixtureAt(t, server.URL())
	_, messages := f.subscribe(f.consumer(func(c *outbox.ConsumerConfig) { c.Lease = time.Minute }), outbox.SubscriberConfig{}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})
	publish := func() string {
		sent := newMessages(1)
		require.Eventually(t, func() bool { return publisher.Publish("topic", sent...) == nil }, waitFor, 10*time.Millisecond)
		return sent[0].UUID
	}
	publish()
	receive(t, messages, 1)
	require.NoError(t, server.Shutdown(t.Context(), pgtest.Fast))
	folder, older := server.DataDir(), t.TempDir()
	require.NoError(t, exec.CommandContext(t.Context(), "cp", "-a", folder+"/.", older).Run())
	require.NoError(t, server.StartAgain(t.Context()))
	f.pool.Reset()
	for range 50 { // their transaction ids are issued again below
		publish()
		receive(t, messages, 1)
	}
	require.NoError(t, server.Shutdown(t.Context(), pgtest.Fast))
	require.NoError(t, exec.CommandContext(t.Context(), "sh", "-c", `rm -rf "$1"/* && cp -a "$2"/. "$1"`, "sh", folder, older).Run())
	require.NoError(t, server.StartAgain(t.Context()))
	f.pool.Reset()

	missing := map[string]bool{}
	for range 20 {
		missing[publish()] = true
	}
	timeout := time.After(waitFor)
	for len(missing) > 0 {
		select {
		case msg := <-messages:
			delete(missing, msg.UUID)
			msg.Ack()
		case <-timeout:
			require.FailNow(t, "messages lost", "%d of 20 never arrived", len(missing))
		}
	}
}

// Passwords that change and roles that are set travel in the pool's hooks. The
// connection of the lease is not of the pool, and went without them.
func TestReservedConnectionUsesThePoolsHooks(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	db := f.pool.Config()
	db.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
		config.RuntimeParams["application_name"] = "hooked before"
		return nil
	}
	db.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SELECT set_config('application_name', current_setting('application_name') || ' and after', false)")
		return err
	}
	_, messages := f.subscribe(f.consumerOn(db, nil), outbox.SubscriberConfig{}, "topic")
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(1)...))
	receive(t, messages, 1)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'hooked before and after' AND query LIKE '%AS p (holder, beat, host, pid)%'"))
}
