package tests

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// A hot standby answers every question and takes no position: constructors
// refuse it, instead of trying for ever. Field case F48.
func TestStandbyIsRefused(t *testing.T) {
	t.Parallel()

	f, server := newOwnFixture(t, pgtest.Options{})
	standby := f.standby(t, server)
	db, err := pgxpool.ParseConfig(standby.URL())
	require.NoError(t, err)
	_, err = outbox.NewConsumer(db, outbox.ConsumerConfig{Schema: oddSchema}, nil)
	require.ErrorIs(t, err, outbox.ErrReadOnly)
}

// standby returns a standby of the fixture's server that has all that the server
// has now.
func (f *fixture) standby(t *testing.T, server *pgtest.Server) *pgtest.Server {
	t.Helper()
	standby, err := server.Standby(context.Background(), pgtest.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, standby.Stop()) })
	f.awaitReplay(t, standby)
	return standby
}

func (f *fixture) awaitReplay(t *testing.T, standby *pgtest.Server) {
	t.Helper()
	var lsn string
	require.NoError(t, f.pool.QueryRow(t.Context(), "SELECT pg_current_wal_lsn()::text").Scan(&lsn))
	pool := pgtest.Pool(t, standby.URL())
	require.Eventually(t, func() bool {
		var behind bool
		err := pool.QueryRow(t.Context(), "SELECT pg_last_wal_replay_lsn() < $1::text::pg_lsn", lsn).Scan(&behind)
		return err == nil && !behind
	}, waitFor, 10*time.Millisecond, "the standby does not follow")
}

// After a failover the old primary is still there, read-only, and answers every
// question, so connections that were opened to it do not fail. A consumer that
// keeps them looks at the old primary for ever while messages go to the new one.
// It must notice, from what it cannot write, and connect to where it can. Field
// case F48.
func TestFailoverToAStandby(t *testing.T) {
	t.Parallel()

	f, server := newOwnFixture(t, pgtest.Options{})
	standby := f.standby(t, server)
	db, err := pgxpool.ParseConfig(fmt.Sprintf("postgres://postgres@%s,%s/postgres?sslmode=disable&target_session_attrs=read-write",
		server.Addr(), standby.Addr()))
	require.NoError(t, err)
	consumer, _ := f.loggedConsumer(db, func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	before, after := newMessages(10), newMessages(10)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", before...))
	requireNext(t, messages, before...)
	f.awaitStored(t, "topic")
	f.awaitReplay(t, standby)

	f.exec("ALTER SYSTEM SET default_transaction_read_only = on")
	f.exec("SELECT pg_reload_conf()")
	pool := pgtest.Pool(t, standby.URL())
	_, err = pool.Exec(t.Context(), "SELECT pg_promote()")
	require.NoError(t, err)
	publisher := publisherOn(t, pool, outbox.PublisherConfig{})
	require.NoError(t, publisher.Publish("topic", after...))
	missing := map[string]bool{}
	for _, msg := range after {
		missing[msg.UUID] = true
	}
	for len(missing) > 0 {
		delete(missing, receive(t, messages, 1)[0].UUID)
	}
}
