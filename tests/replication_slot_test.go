package tests

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
)

func TestReplicationSlots(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text)`)
	ctx := t.Context()
	conn := c.connect()
	slot := c.create(conn, false)
	require.Equal(t, c.slot, slot.Name)
	require.NotZero(t, slot.ConsistentPoint)
	_, err := conn.CreateSlot(ctx, c.slot, replication.SlotOptions{})
	require.ErrorIs(t, err, replication.ErrSlotExists)
	_, err = conn.CreateSlot(ctx, "Orders", replication.SlotOptions{})
	require.ErrorIs(t, err, replication.ErrInvalidName)
	failover := slotName()
	_, err = conn.CreateSlot(ctx, failover, replication.SlotOptions{Failover: true})
	if conn.ServerVersion() < 17 {
		require.ErrorIs(t, err, replication.ErrUnsupported)
	} else {
		require.NoError(t, err)
		info, err := replication.InspectSlot(ctx, c.pool, failover)
		require.NoError(t, err)
		require.True(t, info.Failover)
		require.NoError(t, conn.DropSlot(ctx, failover, false))
	}

	info, err := replication.InspectSlot(ctx, c.pool, c.slot)
	require.NoError(t, err)
	require.Equal(t, "pgoutput", info.Plugin)
	require.Equal(t, databaseOf(t, c.url), info.Database)
	require.False(t, info.Temporary)
	require.False(t, info.IsLost())
	require.Zero(t, info.ActivePID)
	require.Equal(t, slot.ConsistentPoint, info.ConfirmedFlushLSN)
	require.LessOrEqual(t, info.RestartLSN, slot.ConsistentPoint)
	require.NotZero(t, info.RestartLSN)
	require.Equal(t, "reserved", info.WALStatus)
	require.Equal(t, int64(-1), info.SafeBytes)
	before := info.RetainedBytes
	c.exec(`INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 1000)`)
	info, err = replication.InspectSlot(ctx, c.pool, c.slot)
	require.NoError(t, err)
	require.Greater(t, info.RetainedBytes, before+1_000_000)

	// Streamed from, it has a process, and is nobody else's to stream or drop.
	reader := c.start(conn, replication.Options{})
	other := c.connect()
	_, err = replication.StartReader(ctx, other, c.slot, 0, replication.Options{Publications: []string{oddPublication}})
	require.ErrorIs(t, err, replication.ErrSlotInUse)
	require.True(t, replication.IsRetryable(err))
	require.ErrorIs(t, other.DropSlot(ctx, c.slot, false), replication.ErrSlotInUse)
	info, err = replication.InspectSlot(ctx, c.pool, c.slot)
	require.NoError(t, err)
	require.Equal(t, conn.PID(), uint32(info.ActivePID))
	all, err := replication.ListSlots(ctx, c.pool)
	require.NoError(t, err)
	require.Contains(t, names(all), c.slot)

	// The server has let go of it when Close returns.
	require.NoError(t, reader.Close())
	require.NoError(t, other.DropSlot(ctx, c.slot, false))
	_, err = replication.InspectSlot(ctx, c.pool, c.slot)
	require.ErrorIs(t, err, replication.ErrSlotMissing)
	err = other.DropSlot(ctx, c.slot, true)
	require.ErrorIs(t, err, replication.ErrSlotMissing)
	require.True(t, replication.IsSlotGone(err))
	_, err = replication.StartReader(ctx, other, c.slot, 0, replication.Options{Publications: []string{oddPublication}})
	require.ErrorIs(t, err, replication.ErrSlotMissing)

	// Words of the replication grammar are names like others.
	for _, name := range []string{"temporary", "logical", "1"} {
		_, err = other.CreateSlot(ctx, name, replication.SlotOptions{Temporary: true})
		require.NoError(t, err)
		require.NoError(t, other.DropSlot(ctx, name, false))
	}
}

func databaseOf(t testing.TB, url string) string {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	return config.Database
}

func names(slots []replication.SlotInfo) []string {
	var list []string
	for _, slot := range slots {
		list = append(list, slot.Name)
	}
	return list
}

// Only the connection that made a temporary slot streams from it, and it goes
// with that connection, whatever ends it.
func TestReplicationTemporarySlotVanishes(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text)`)
	ctx := t.Context()
	proxy := pgtest.NewProxy(t, pgtest.Shared(t).Addr())
	ends := map[string]func(conn *replication.Conn, reader *replication.Reader){
		"stream closed": func(_ *replication.Conn, reader *replication.Reader) { require.NoError(t, reader.Close()) },
		"backend terminated": func(conn *replication.Conn, _ *replication.Reader) {
			c.exec(`SELECT pg_terminate_backend($1)`, conn.PID())
		},
		"connection cut": func(*replication.Conn, *replication.Reader) { proxy.CutAll() },
	}
	for name, end := range ends {
		conn := connectAt(t, proxy.URL(c.url), replication.ConnectOptions{})
		c.create(conn, true)
		info, err := replication.InspectSlot(ctx, c.pool, c.slot)
		require.NoError(t, err)
		require.True(t, info.Temporary)
		reader := c.start(conn, replication.Options{})
		end(conn, reader)
		<-reader.Done()
		t.Log(name, reader.Err())
		c.slotIsGone()
	}
	conn := c.connect()
	c.create(conn, true)
	require.NoError(t, conn.Close(ctx))
	c.slotIsGone()
}

// Slot creation waits for the transactions that run. lock_timeout ends that.
func TestReplicationSlotBehindTransaction(t *testing.T) {
	t.Parallel()
	// A server of its own: on the shared one the test would wait for others,
	// and they for it.
	server := pgtest.Own(t, pgtest.Options{})
	c := captureOn(t, server, `CREATE TABLE t (id text)`)
	ctx := t.Context()
	tx, err := c.pool.Begin(ctx)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, `INSERT INTO t VALUES ('open')`)
	require.NoError(t, err)

	for _, temporary := range []bool{true, false} {
		conn := connectAt(t, c.url, replication.ConnectOptions{Settings: map[string]string{"lock_timeout": "300ms"}})
		began := time.Now()
		_, err = conn.CreateSlot(ctx, c.slot, replication.SlotOptions{Temporary: temporary})
		require.ErrorIs(t, err, replication.ErrLockTimeout)
		require.True(t, replication.IsRetryable(err))
		require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond)
		require.Less(t, time.Since(began), 10*time.Second)
		_, err = replication.InspectSlot(ctx, c.pool, c.slot)
		require.ErrorIs(t, err, replication.ErrSlotMissing, "none is left, although the connection stands")
		_, err = conn.IdentifySystem(ctx)
		require.NoError(t, err)
	}

	// A context ends it, too, and the connection with it.
	conn := c.connect()
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	_, err = conn.CreateSlot(short, c.slot, replication.SlotOptions{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, conn.Close(ctx))
	c.slotIsGone()

	// When the transaction ends in time there is a slot, and a stream.
	conn = c.connect()
	go func() {
		time.Sleep(100 * time.Millisecond)
		_ = tx.Commit(ctx)
	}()
	c.create(conn, true)
	reader := c.start(conn, replication.Options{})
	c.exec(`INSERT INTO t VALUES ('after')`)
	require.Equal(t, []string{"after"}, inserted(transaction(t, reader)))
}

// replicationChild is the environment variable with the URL for a copy of the
// test binary that creates the slot named by replicationChildSlot, says so, and
// streams from it until it is killed.
const (
	replicationChild     = "OUTBOX_TEST_REPLICATION_CHILD_URL"
	replicationChildSlot = "OUTBOX_TEST_REPLICATION_CHILD_SLOT"
)

func init() { children[replicationChild] = replicateAsChild }

func replicateAsChild() error {
	ctx := context.Background()
	conn, err := tryConnect(ctx, os.Getenv(replicationChild), replication.ConnectOptions{Settings: map[string]string{"lock_timeout": "2s"}})
	if err != nil {
		return err
	}
	if _, err := os.Stdout.WriteString("connected\n"); err != nil {
		return err
	}
	slot := os.Getenv(replicationChildSlot)
	if _, err := conn.CreateSlot(ctx, slot, replication.SlotOptions{Temporary: true}); err != nil {
		return err
	}
	reader, err := replication.StartReader(ctx, conn, slot, 0, replication.Options{Publications: []string{oddPublication}})
	if err != nil {
		return err
	}
	if _, err := os.Stdout.WriteString("streaming\n"); err != nil {
		return err
	}
	for {
		if _, err := reader.Next(ctx); err != nil {
			return err
		}
	}
}

// startChild runs a copy of the test binary up to the line that it says.
func (c *capture) startChild(line string) *exec.Cmd {
	c.t.Helper()
	command := exec.CommandContext(context.WithoutCancel(c.t.Context()), os.Args[0])
	command.Env = append(os.Environ(), replicationChild+"="+c.url, replicationChildSlot+"="+c.slot)
	command.Stderr = os.Stderr
	stdout, err := command.StdoutPipe()
	require.NoError(c.t, err)
	require.NoError(c.t, command.Start())
	c.t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait() // it was killed
	})
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if strings.TrimSpace(lines.Text()) == line {
			return command
		}
	}
	require.FailNow(c.t, "the child has ended", "%v", lines.Err())
	return nil
}

// A process that is killed leaves no slot behind, even if that was only being
// created.
func TestReplicationKill(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{})
	c := captureOn(t, server, `CREATE TABLE t (id text)`)
	child := c.startChild("streaming")
	_, err := replication.InspectSlot(t.Context(), c.pool, c.slot)
	require.NoError(t, err)
	require.NoError(t, child.Process.Kill())
	c.slotIsGone()

	tx, err := c.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO t VALUES ('open')`)
	require.NoError(t, err)
	child = c.startChild("connected")
	require.Eventually(t, func() bool {
		_, err := replication.InspectSlot(t.Context(), c.pool, c.slot)
		return err == nil
	}, waitFor, 5*time.Millisecond)
	require.NoError(t, child.Process.Kill())
	killed := time.Now()
	c.slotIsGone()
	require.Less(t, time.Since(killed), 10*time.Second)
	require.NoError(t, tx.Rollback(t.Context()))
}

func TestReplicationNoFreeSlot(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{"max_replication_slots": "1"}})
	conn := connectAt(t, server.URL(), replication.ConnectOptions{})
	_, err := conn.CreateSlot(t.Context(), "one", replication.SlotOptions{Temporary: true})
	require.NoError(t, err)
	_, err = conn.CreateSlot(t.Context(), "two", replication.SlotOptions{Temporary: true})
	require.ErrorIs(t, err, replication.ErrNoFreeSlot)
	require.True(t, replication.IsRetryable(err))
}

func TestReplicationWALLevel(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{})
	c := captureOn(t, server, `CREATE TABLE t (id text)`)
	conn := c.connect()
	c.create(conn, true)
	require.NoError(t, conn.Close(t.Context()))
	require.NoError(t, server.Reconfigure(t.Context(), map[string]string{"wal_level": "replica"}))
	conn = c.connect()
	_, err := conn.CreateSlot(t.Context(), c.slot, replication.SlotOptions{Temporary: true})
	require.ErrorIs(t, err, replication.ErrWALLevel)
	require.ErrorContains(t, err, "wal_level is replica")
	require.True(t, replication.IsMisconfigured(err))
	require.False(t, replication.IsRetryable(err))
	_, err = replication.StartReader(t.Context(), conn, c.slot, 0, replication.Options{Publications: []string{oddPublication}})
	require.ErrorIs(t, err, replication.ErrWALLevel)
	_, err = conn.IdentifySystem(t.Context())
	require.NoError(t, err, "the connection stands")
}

// A slot that pins too much loses its WAL.
func TestReplicationSlotLost(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{
		"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB",
	}})
	c := captureOn(t, server, `CREATE TABLE t (id text)`)
	ctx := t.Context()
	conn := c.connect()
	c.create(conn, false)
	info, err := replication.InspectSlot(ctx, c.pool, c.slot)
	require.NoError(t, err)
	require.Positive(t, info.SafeBytes)
	require.Eventually(t, func() bool {
		c.exec(`SELECT pg_switch_wal()`)
		c.exec(`INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 5000)`)
		c.exec(`CHECKPOINT`)
		info, err = replication.InspectSlot(ctx, c.pool, c.slot)
		require.NoError(t, err)
		return info.IsLost()
	}, waitFor, time.Millisecond)
	require.Equal(t, "lost", info.WALStatus)
	require.Zero(t, info.RestartLSN)
	require.Zero(t, info.RetainedBytes)

	_, err = replication.StartReader(ctx, conn, c.slot, 0, replication.Options{Publications: []string{oddPublication}})
	require.ErrorIs(t, err, replication.ErrSlotLost)
	require.True(t, replication.IsSlotGone(err))
	require.False(t, replication.IsRetryable(err))
	require.NoError(t, conn.DropSlot(ctx, c.slot, false))

	// A stream that is in use is thrown out.
	c.create(conn, true)
	reader := c.start(conn, replication.Options{})
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		for reader.Err() == nil && ctx.Err() == nil {
			_, _ = c.pool.Exec(ctx, `SELECT pg_switch_wal()`)
			_, _ = c.pool.Exec(ctx, `INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 5000)`)
			_, _ = c.pool.Exec(ctx, `CHECKPOINT`)
		}
	}()
	await(t, reader.Done())
	<-stop
	require.True(t, replication.IsRetryable(reader.Err()), reader.Err())
	require.ErrorIs(t, reader.Err(), replication.ErrShutdown)
	c.slotIsGone()
}

func TestReplicationOnStandby(t *testing.T) {
	t.Parallel()
	primary := pgtest.Own(t, pgtest.Options{})
	standby, err := primary.Standby(t.Context(), pgtest.Options{})
	require.NoError(t, err)
	pgtest.Cleanup(t, standby)
	conn := connectAt(t, standby.URL(), replication.ConnectOptions{})
	here, err := conn.IdentifySystem(t.Context())
	require.NoError(t, err)
	there, err := connectAt(t, primary.URL(), replication.ConnectOptions{}).IdentifySystem(t.Context())
	require.NoError(t, err)
	require.Equal(t, there.ID, here.ID)
	if conn.ServerVersion() < 16 {
		_, err = conn.CreateSlot(t.Context(), slotName(), replication.SlotOptions{Temporary: true})
		require.ErrorIs(t, err, replication.ErrUnsupported)
		require.True(t, replication.IsMisconfigured(err))
	}
	slots, err := replication.ListSlots(t.Context(), pgtest.Pool(t, standby.URL()))
	require.NoError(t, err)
	require.Empty(t, slots, "it works there")
}

func TestReplicationPublications(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	pool := pgtest.Pool(t, url+"&search_path=")
	ctx := t.Context()
	_, err := pool.Exec(ctx, `CREATE SCHEMA "Odd 's'"; CREATE TABLE "Odd 's'"."T ""1""" (id int PRIMARY KEY) PARTITION BY RANGE (id);
		CREATE TABLE public.part PARTITION OF "Odd 's'"."T ""1""" FOR VALUES FROM (0) TO (10); CREATE TABLE public.plain (id int)`)
	require.NoError(t, err)
	root, part, plain := replication.Table{Schema: "Odd 's'", Name: `T "1"`}, replication.Table{Schema: "public", Name: "part"}, replication.Table{Schema: "public", Name: "plain"}

	want := replication.Publication{Name: oddPublication, Tables: []replication.Table{root, plain}, Insert: true, Truncate: true, ViaRoot: true}
	exists, err := replication.PublicationExists(ctx, pool, want.Name)
	require.NoError(t, err)
	require.False(t, exists)
	_, err = replication.DescribePublication(ctx, pool, want.Name)
	require.ErrorIs(t, err, replication.ErrPublicationMissing)
	require.NoError(t, replication.CreatePublication(ctx, pool, want))
	require.ErrorIs(t, replication.CreatePublication(ctx, pool, want), replication.ErrPublicationExists)
	exists, err = replication.PublicationExists(ctx, pool, want.Name)
	require.NoError(t, err)
	require.True(t, exists)
	got, err := replication.DescribePublication(ctx, pool, want.Name)
	require.NoError(t, err)
	require.NotZero(t, got.OID)
	want.OID = got.OID
	require.Equal(t, want, got)

	// Without the root it is about partitions.
	leaves := replication.Publication{Name: "leaves", Tables: []replication.Table{root}, Update: true, Delete: true}
	require.NoError(t, replication.CreatePublication(ctx, pool, leaves))
	got, err = replication.DescribePublication(ctx, pool, "leaves")
	require.NoError(t, err)
	require.Equal(t, []replication.Table{part}, got.Tables)
	require.False(t, got.Insert || got.Truncate || got.ViaRoot || got.AllTables)
	require.True(t, got.Update && got.Delete)

	require.NoError(t, replication.CreatePublication(ctx, pool, replication.Publication{Name: "all", AllTables: true, Insert: true}))
	got, err = replication.DescribePublication(ctx, pool, "all")
	require.NoError(t, err)
	require.True(t, got.AllTables)
	require.ElementsMatch(t, []replication.Table{part, plain}, got.Tables)

	// And one without any table, which only SQL can make.
	_, err = pool.Exec(ctx, `CREATE PUBLICATION empty`)
	require.NoError(t, err)
	got, err = replication.DescribePublication(ctx, pool, "empty")
	require.NoError(t, err)
	require.Empty(t, got.Tables)

	err = replication.CreatePublication(ctx, pool, replication.Publication{Name: "p", Tables: []replication.Table{{Schema: "public", Name: "none"}}, Insert: true})
	require.True(t, replication.IsMisconfigured(err), err)
}
