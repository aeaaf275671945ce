package tests

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// TestFailover is about servers that are not the one they were: promoted,
// read-only, or another at the same address. A stream and a position belong to
// one life of one server; whoever takes the one for the other loses what the
// next life does with ids that the last one had given out already. Field cases
// F29, F35 and F48.
func TestFailover(t *testing.T) {
	t.Parallel()

	// The old primary can be seen for what it is when it takes no writes. When it
	// is only cut off from newcomers it takes them from whoever is connected:
	// here the sessions of the pool come to their end, and the others go on.
	for name, fenced := range map[string]bool{"to a standby that lags, the old primary read-only": false, "to a standby that lags, the old primary fenced": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failOver(t, fenced)
		})
	}
	t.Run("an address that leads to a standby for a while", func(t *testing.T) {
		t.Parallel()
		leadToStandby(t)
	})
	t.Run("a stream that would come from another server", func(t *testing.T) {
		t.Parallel()
		leadStreamElsewhere(t)
	})
}

// beatStatement is part of the statement that renews a process's lease.
const beatStatement = "AS p (holder, beat"

func failOver(t *testing.T, fenced bool) {
	// So many that ids and transaction ids are given out again, although a
	// standby knows of the next 32 ids.
	const replicated, missing, fresh = 20, 150, 250
	f, server := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_connections": "50"}})
	standby := f.standby(t, server)
	proxy := f.proxy(t)
	db, err := pgxpool.ParseConfig(fmt.Sprintf("postgres://postgres@%s,%s/postgres?sslmode=disable&target_session_attrs=read-write",
		proxy.Addr(), standby.Addr()))
	require.NoError(t, err)
	consumer, book := f.loggedConsumer(db, func(c *outbox.ConsumerConfig) {
		liveAuto(c)
		c.Lease = outbox.MinLease
	})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")

	var mu sync.Mutex
	got := map[string]int{}
	uuidOf := map[int64]string{}
	reissued, live := 0, 0
	go func() {
		for msg := range messages {
			d, _ := outbox.DeliveryFromCtx(msg.Context())
			mu.Lock()
			got[msg.UUID]++
			if earlier, ok := uuidOf[d.ID]; ok && earlier != msg.UUID {
				reissued++
			}
			uuidOf[d.ID] = msg.UUID
			if fromWAL(consumer) {
				live++
			}
			mu.Unlock()
			msg.Ack()
		}
	}()
	arrived := func(uuids []string) bool {
		mu.Lock()
		defer mu.Unlock()
		for _, uuid := range uuids {
			if got[uuid] == 0 {
				return false
			}
		}
		return true
	}
	publish := func(publisher *outbox.Publisher, n int) []string {
		sent := newMessages(n)
		for _, msg := range sent { // each in a transaction of its own
			require.NoError(t, publisher.Publish("topic", msg))
		}
		return uuids(sent)
	}
	publisher := f.publisher(outbox.PublisherConfig{})
	awaitLive(t, consumer)
	first := publish(publisher, replicated)
	require.Eventually(t, func() bool { return arrived(first) }, waitFor, 2*time.Millisecond)
	f.awaitStored(t, "topic")
	f.awaitReplay(t, standby)

	// What is published now comes from the WAL, and never gets to the standby.
	next := pgtest.Pool(t, standby.URL())
	_, err = next.Exec(t.Context(), "ALTER SYSTEM SET primary_conninfo = ''")
	require.NoError(t, err)
	_, err = next.Exec(t.Context(), "SELECT pg_reload_conf()")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM pg_stat_replication WHERE application_name NOT LIKE 'watermill%'") == 0
	}, waitFor, 5*time.Millisecond, "the standby goes on following")
	forgotten := publish(publisher, missing)
	require.Eventually(t, func() bool { return arrived(forgotten) }, waitFor, 2*time.Millisecond)
	mu.Lock()
	lived := live
	mu.Unlock()
	require.Greater(t, lived, missing/2, "most came from the table: the test proves little")
	slot := consumer.Status().Slot

	if fenced {
		proxy.RefuseNew(true)
		// Those of the pool; the stream and the reserved ones stay.
		ended := f.number(`SELECT count(pg_terminate_backend(pid))::int FROM pg_stat_activity
			WHERE application_name = 'watermill-outbox' AND backend_type = 'client backend'
			    AND query NOT LIKE '%' || $1 || '%' AND query NOT LIKE '%' || $2 || '%'`, barrierStatement, beatStatement)
		require.Positive(t, ended)
	} else {
		f.exec("ALTER SYSTEM SET default_transaction_read_only = on")
		f.exec("SELECT pg_reload_conf()")
	}
	_, err = next.Exec(t.Context(), "SELECT pg_promote()")
	require.NoError(t, err)
	began := time.Now()
	committed := publish(publisherOn(t, next, outbox.PublisherConfig{}), fresh)
	require.Eventually(t, func() bool { return arrived(committed) }, waitFor, 5*time.Millisecond, "messages of the new primary are lost")
	took := time.Since(began)

	// The lease is renewed there, too, or it would be lost with each beat.
	awaitBeats := func(n int) {
		t.Helper()
		beats := func() (n int) {
			require.NoError(t, next.QueryRow(t.Context(), f.sql("SELECT coalesce(sum(beat), 0)::int FROM outbox.processes")).Scan(&n))
			return n
		}
		before := beats()
		require.Eventually(t, func() bool { return beats() >= before+n }, waitFor, 5*time.Millisecond, "the lease is not renewed on the new primary")
	}
	awaitBeats(1)
	losses := len(book.find("Topic lost"))
	awaitBeats(3)
	require.Len(t, book.find("Topic lost"), losses, "the lease is lost again and again")

	require.Eventually(t, func() bool {
		now := consumer.Status().Slot
		return now != "" && now != slot
	}, waitFor, 5*time.Millisecond, "the stream of the old primary goes on")
	awaitLive(t, consumer)
	var there int
	require.NoError(t, next.QueryRow(t.Context(), "SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name = $1", consumer.Status().Slot).Scan(&there))
	require.Equal(t, 1, there, "the stream does not come from the new primary")
	last := publish(publisherOn(t, next, outbox.PublisherConfig{}), 3)
	require.Eventually(t, func() bool { return arrived(last) }, waitFor, 2*time.Millisecond)

	var stored []string
	require.NoError(t, next.QueryRow(t.Context(), f.sql("SELECT array_agg(uuid) FROM outbox.messages")).Scan(&stored))
	lost := 0
	for _, uuid := range stored {
		if !arrived([]string{uuid}) {
			lost++
		}
	}
	mu.Lock()
	defer mu.Unlock()
	repeated := 0
	for _, n := range got {
		repeated += n - 1
	}
	t.Logf("committed=%d forgotten=%d of_those_live=%d delivered=%d lost=%d repeated=%d ids_issued_again=%d delivered_after=%s streams=%d",
		len(stored), missing, min(lived, missing), len(got), lost, repeated, reissued, took.Round(time.Millisecond),
		len(book.find("Messages are read from the WAL")))
	require.Zero(t, lost)
	require.Len(t, stored, replicated+fresh+len(last))
	require.Positive(t, reissued, "no id was issued twice: the test proves nothing")
}

// switchedAddress is a connection configuration whose address leads where the
// test wants it.
type switchedAddress struct {
	to       atomic.Value // "host:port"
	connects sync.Map     // how often, by address
}

func (s *switchedAddress) config(f *fixture) *pgxpool.Config {
	db := f.pool.Config()
	db.ConnConfig.DialFunc = func(ctx context.Context, network, _ string) (net.Conn, error) {
		to := s.to.Load().(string)
		n, _ := s.connects.LoadOrStore(to, new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
		return new(net.Dialer).DialContext(ctx, network, to)
	}
	return db
}

func (s *switchedAddress) count(to string) int64 {
	if n, ok := s.connects.Load(to); ok {
		return n.(*atomic.Int64).Load()
	}
	return 0
}

func leadToStandby(t *testing.T) {
	f, server := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_connections": "50"}})
	standby := f.standby(t, server)
	address := &switchedAddress{}
	address.to.Store(standby.Addr())
	for _, mode := range []outbox.Mode{outbox.ModeAuto, outbox.ModeWAL, outbox.ModePoll} {
		_, err := outbox.NewConsumer(address.config(f), outbox.ConsumerConfig{Schema: oddSchema, Mode: mode}, nil)
		require.ErrorIs(t, err, outbox.ErrReadOnly)
	}

	address.to.Store(server.Addr())
	consumer, book := f.loggedConsumer(address.config(f), liveAuto)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})
	awaitLive(t, consumer)
	sent := newMessages(30)
	require.NoError(t, publisher.Publish("topic", sent[:10]...))
	requireNext(t, messages, sent[:10]...)
	f.awaitStored(t, "topic")

	refused := address.count(standby.Addr())
	address.to.Store(standby.Addr())
	f.exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name = 'watermill-outbox'")
	awaitPolling(t, consumer, outbox.ErrReadOnly.Error())
	require.NoError(t, publisher.Publish("topic", sent[10:20]...))
	require.Eventually(t, func() bool { return address.count(standby.Addr()) > refused+10 }, waitFor, 5*time.Millisecond)
	require.Error(t, consumer.Status().Ready())
	select {
	case msg := <-messages:
		require.FailNow(t, "a standby does not tell what to deliver", msg.UUID)
	default:
	}

	began := time.Now()
	address.to.Store(server.Addr())
	requireNext(t, messages, sent[10:20]...)
	took := time.Since(began)
	awaitLive(t, consumer)
	back := time.Since(began)
	require.NoError(t, consumer.Status().Ready())
	require.NoError(t, publisher.Publish("topic", sent[20:]...))
	requireNext(t, messages, sent[20:]...)
	t.Logf("committed=%d delivered=%d lost=0 connections_to_the_standby=%d delivered_after=%s live_after=%s streams=%d", len(sent), len(sent),
		address.count(standby.Addr()), took.Round(time.Millisecond), back.Round(time.Millisecond), len(book.find("Messages are read from the WAL")))
}

// crossing leads replication connections to another server than all others, as
// a proxy does whose rules mean something else by them.
type crossing struct {
	net.Conn  // of ordinary connections, and before the first message
	elsewhere string
	first     bool
}

// Write sends the startup message, which says what the connection is for, to
// whom it goes.
func (c *crossing) Write(b []byte) (int, error) {
	if c.first && bytes.Contains(b, []byte("replication\x00database\x00")) {
		other, err := net.Dial("tcp", c.elsewhere) //nolint:noctx // a local server
		if err != nil {
			return 0, err
		}
		_ = c.Conn.Close() // nobody will hear of it
		c.Conn = other
	}
	c.first = false
	return c.Conn.Write(b)
}

func leadStreamElsewhere(t *testing.T) {
	f, server := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_connections": "50"}})
	otherFixture, other := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_connections": "50"}})
	crossed := func() *pgxpool.Config {
		db := f.pool.Config()
		db.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			return &crossing{Conn: conn, elsewhere: other.Addr(), first: true}, err
		}
		return db
	}
	publisher := f.publisher(outbox.PublisherConfig{})
	try := func(name string) {
		consumer, book := f.loggedConsumer(crossed(), liveAuto)
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		awaitPolling(t, consumer, "the server is another")
		otherPublisher := publisherOn(t, otherFixture.pool, outbox.PublisherConfig{})
		sent := newMessages(50)
		for i := 0; i < len(sent); i += 5 {
			require.NoError(t, otherPublisher.Publish("topic", message.NewMessage(watermill.NewUUID(), []byte("elsewhere"))))
			require.NoError(t, publisher.Publish("topic", sent[i:i+5]...))
			requireNext(t, messages, sent[i:i+5]...)
		}
		require.Equal(t, outbox.SourceTable, consumer.Status().Subscriptions[0].Source)
		require.Empty(t, book.find("Messages are read from the WAL"))
		t.Logf("%s: committed=%d delivered=%d from_elsewhere=0 reason=%q", name, len(sent), len(sent), consumer.Status().Reason)
		require.NoError(t, consumer.Close())
	}
	try("another cluster")

	// A copy of the data folder is the same cluster, on the same timeline, and
	// whatever the server says of itself is the same.
	require.NoError(t, server.Shutdown(t.Context(), pgtest.Fast))
	require.NoError(t, other.Shutdown(t.Context(), pgtest.Fast))
	own := filepath.Join(other.DataDir(), "pgtest.conf")
	config, err := os.ReadFile(own)
	require.NoError(t, err)
	require.NoError(t, exec.CommandContext(t.Context(), "sh", "-c", `rm -rf "$1"/* && cp -a "$2"/. "$1"`, "sh", other.DataDir(), server.DataDir()).Run())
	require.NoError(t, os.WriteFile(own, config, 0o600))
	require.NoError(t, server.StartAgain(t.Context()))
	require.NoError(t, other.StartAgain(t.Context()))
	f.pool.Reset()
	otherFixture.pool.Reset()
	for range 3 { // it has come further, so all that the readers' server has counts as received
		_, err := otherFixture.pool.Exec(t.Context(), "CREATE TABLE IF NOT EXISTS filler AS SELECT 1; SELECT pg_switch_wal()")
		require.NoError(t, err)
	}
	try("a copy of the server")
}
