package tests

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/replication"
)

const eventTables = `
	CREATE TYPE colour AS ENUM ('red', 'green');
	CREATE TABLE things (id int8 PRIMARY KEY, name text, raw bytea, doc json, at timestamptz, paint colour);
	CREATE TABLE wide (id int8 PRIMARY KEY, n int NOT NULL, big text NOT NULL);
	ALTER TABLE wide REPLICA IDENTITY FULL;
	ALTER TABLE wide ALTER big SET STORAGE EXTERNAL;
	CREATE TABLE slim (id int8 PRIMARY KEY, n int NOT NULL, big text NOT NULL);
	ALTER TABLE slim ALTER big SET STORAGE EXTERNAL;
	CREATE TABLE parts (id int8 PRIMARY KEY, v text) PARTITION BY RANGE (id);
	CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10);`

// bigText is stored out of line.
const bigText = `repeat('x', 3000)`

// makeEvents makes every kind of event.
func makeEvents(c *capture) {
	c.exec(`INSERT INTO things VALUES (1, 'one', '\x00ff', '{"a": [1, null]}', '2024-05-06 07:08:09.123456+02', 'red'),
		(2, NULL, NULL, NULL, NULL, NULL), (3, '', '', '""', 'infinity', 'green')`)
	c.exec(`UPDATE things SET name = 'uno' WHERE id = 1`)
	c.exec(`UPDATE things SET id = 10 WHERE id = 1`)
	c.exec(`DELETE FROM things WHERE id = 2`)
	c.exec(`INSERT INTO wide VALUES (1, 1, ` + bigText + `)`)
	c.exec(`UPDATE wide SET n = 2`)
	c.exec(`DELETE FROM wide`)
	c.exec(`INSERT INTO slim VALUES (1, 1, ` + bigText + `)`)
	c.exec(`UPDATE slim SET n = 2`)
	c.exec(`INSERT INTO parts VALUES (1, 'in a partition')`)
	c.exec(`TRUNCATE things, wide RESTART IDENTITY CASCADE`)
	c.exec(`SELECT pg_logical_emit_message(true, 'in', 'transactional')`)
	c.exec(`SELECT pg_logical_emit_message(false, 'out', '\x0001'::bytea)`)
}

func TestReplicationEventsAsText(t *testing.T) {
	t.Parallel()
	c := newCapture(t, eventTables)
	reader := c.stream(replication.Options{Messages: true})
	before := time.Now().Add(-time.Minute)
	makeEvents(c)
	big := string(bytes.Repeat([]byte("x"), 3000))

	begin := nextAs[*replication.Begin](t, reader)
	require.WithinRange(t, begin.CommitTime, before, time.Now().Add(time.Minute))
	require.Less(t, begin.LSN, begin.FinalLSN)
	colour := nextAs[*replication.Type](t, reader)
	require.Equal(t, "public.colour", colour.Schema+"."+colour.Name)
	things := nextAs[*replication.Relation](t, reader)
	require.Equal(t, "public.things", things.Schema+"."+things.Name)
	require.Equal(t, byte('d'), things.Identity)
	require.Equal(t, []replication.Column{
		{Name: "id", Key: true, TypeOID: pgtype.Int8OID, TypeModifier: -1},
		{Name: "name", TypeOID: pgtype.TextOID, TypeModifier: -1},
		{Name: "raw", TypeOID: pgtype.ByteaOID, TypeModifier: -1},
		{Name: "doc", TypeOID: pgtype.JSONOID, TypeModifier: -1},
		{Name: "at", TypeOID: pgtype.TimestamptzOID, TypeModifier: -1},
		{Name: "paint", TypeOID: colour.OID, TypeModifier: -1},
	}, things.Columns)
	for _, want := range [][]string{
		{"1", "one", `\x00ff`, `{"a": [1, null]}`, "2024-05-06 05:08:09.123456+00", "red"},
		{"2", "<null>", "<null>", "<null>", "<null>", "<null>"},
		{"3", "", `\x`, `""`, "infinity", "green"},
	} {
		insert := nextChange[*replication.Insert](t, reader)
		require.Equal(t, things, insert.Relation)
		require.Equal(t, want, texts(insert.New))
	}
	commit := nextChange[*replication.Commit](t, reader)
	require.Equal(t, begin.FinalLSN, commit.CommitLSN)
	require.Greater(t, commit.EndLSN, commit.CommitLSN)
	require.True(t, begin.CommitTime.Equal(commit.CommitTime))

	update := transaction(t, reader)[1].(*replication.Update)
	require.Equal(t, replication.OldNone, update.OldKind)
	require.Nil(t, update.Old)
	require.Equal(t, []string{"1", "uno"}, texts(update.New)[:2])

	update = transaction(t, reader)[1].(*replication.Update)
	require.Equal(t, replication.OldKey, update.OldKind)
	require.Equal(t, []string{"1", "<null>"}, texts(update.Old)[:2])
	require.Equal(t, []string{"10", "uno"}, texts(update.New)[:2])

	gone := transaction(t, reader)[1].(*replication.Delete)
	require.Equal(t, replication.OldKey, gone.OldKind)
	require.Equal(t, []string{"2", "<null>"}, texts(gone.Old)[:2])

	require.Equal(t, []string{"1", "1", big}, texts(transaction(t, reader)[1].(*replication.Insert).New))
	update = transaction(t, reader)[1].(*replication.Update)
	require.Equal(t, byte('f'), update.Relation.Identity)
	require.Equal(t, replication.OldRow, update.OldKind)
	require.Equal(t, []string{"1", "1", big}, texts(update.Old))
	// With the whole row as its identity the server reads the value for it.
	require.Contains(t, []string{"<unchanged>", big}, texts(update.New)[2])
	gone = transaction(t, reader)[1].(*replication.Delete)
	require.Equal(t, replication.OldRow, gone.OldKind)
	require.Equal(t, []string{"1", "2", big}, texts(gone.Old))

	require.Equal(t, []string{"1", "1", big}, texts(transaction(t, reader)[1].(*replication.Insert).New))
	update = transaction(t, reader)[1].(*replication.Update)
	require.Equal(t, []string{"1", "2", "<unchanged>"}, texts(update.New))
	require.True(t, update.New[2].IsUnchanged())
	require.False(t, update.New[2].IsNull())

	insert := transaction(t, reader)[1].(*replication.Insert)
	require.Equal(t, "parts", insert.Relation.Name, "via the root")
	require.Equal(t, []string{"1", "in a partition"}, texts(insert.New))

	truncate := transaction(t, reader)[1].(*replication.Truncate)
	require.True(t, truncate.Cascade)
	require.True(t, truncate.RestartIdentity)
	require.Len(t, truncate.Relations, 2)
	require.Equal(t, "things", truncate.Relations[0].Name)
	require.Equal(t, "wide", truncate.Relations[1].Name)

	message := transaction(t, reader)[1].(*replication.Message)
	require.True(t, message.Transactional)
	require.Equal(t, "in", message.Prefix)
	require.Equal(t, "transactional", string(message.Content))
	message = nextAs[*replication.Message](t, reader)
	require.False(t, message.Transactional)
	require.Equal(t, "out", message.Prefix)
	require.Equal(t, []byte{0, 1}, message.Content)
	require.NotZero(t, message.LSN)
}

func TestReplicationEventsAsBinary(t *testing.T) {
	t.Parallel()
	c := newCapture(t, eventTables)
	reader := c.stream(replication.Options{Binary: true, ProtoVersion: 2})
	makeEvents(c)

	insert := transaction(t, reader)[1].(*replication.Insert)
	require.Equal(t, int64(1), int64(binary.BigEndian.Uint64(insert.New[0].Data)))
	require.Equal(t, replication.Binary, insert.New[0].Kind)
	require.Equal(t, []byte{0, 0xff}, insert.New[2].Data)
	// As pgx reads them.
	types := pgtype.NewMap()
	var id int64
	var name string
	var doc map[string]any
	var at time.Time
	for i, target := range []any{&id, &name, nil, &doc, &at} {
		if target != nil {
			require.NoError(t, types.Scan(insert.Relation.Columns[i].TypeOID, insert.New[i].FormatCode(), insert.New[i].Data, target))
		}
	}
	require.Equal(t, int64(1), id)
	require.Equal(t, "one", name)
	require.Equal(t, map[string]any{"a": []any{1.0, nil}}, doc)
	require.True(t, time.Date(2024, 5, 6, 5, 8, 9, 123456000, time.UTC).Equal(at))
	for range 8 {
		transaction(t, reader)
	}
	insert = transaction(t, reader)[1].(*replication.Insert)
	require.Equal(t, "parts", insert.Relation.Name)
	transaction(t, reader) // truncate

	// Logical messages were not asked for, so the next is this one.
	c.exec(`INSERT INTO things (id) VALUES (77)`)
	insert = transaction(t, reader)[1].(*replication.Insert)
	require.Equal(t, int64(77), int64(binary.BigEndian.Uint64(insert.New[0].Data)))
	require.True(t, insert.New[1].IsNull())
	require.Nil(t, insert.New[1].Data)
}

// Transactions come whole, in the order of their commits; what was rolled back
// does not.
func TestReplicationTransactions(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text)`)
	reader := c.stream(replication.Options{})
	ctx := t.Context()
	begin := func() pgx.Tx {
		tx, err := c.pool.Begin(ctx)
		require.NoError(t, err)
		return tx
	}
	insert := func(tx pgx.Tx, id string) {
		_, err := tx.Exec(ctx, `INSERT INTO t VALUES ($1)`, id)
		require.NoError(t, err)
	}
	// Three that overlap: the first to write is the last to commit, and the
	// one between is rolled back.
	a, b, x := begin(), begin(), begin()
	insert(a, "a1")
	insert(x, "x1")
	insert(b, "b1")
	var xid uint64
	require.NoError(t, a.QueryRow(ctx, `SELECT pg_current_xact_id()::text::int8`).Scan(&xid))
	insert(a, "a2")
	require.NoError(t, b.Commit(ctx))
	require.NoError(t, x.Rollback(ctx))
	// Savepoints, kept and not.
	kept, err := a.Begin(ctx)
	require.NoError(t, err)
	insert(kept, "kept")
	inner, err := kept.Begin(ctx)
	require.NoError(t, err)
	insert(inner, "undone")
	require.NoError(t, inner.Rollback(ctx))
	require.NoError(t, kept.Commit(ctx))
	insert(a, "a3")
	require.NoError(t, a.Commit(ctx))
	c.exec(`INSERT INTO t VALUES ('last')`)

	first := transaction(t, reader)
	second := transaction(t, reader)
	third := transaction(t, reader)
	require.Equal(t, []string{"b1"}, inserted(first))
	require.Equal(t, []string{"a1", "a2", "kept", "a3"}, inserted(second))
	require.Equal(t, []string{"last"}, inserted(third))
	require.Less(t, commitOf(first).EndLSN, commitOf(second).EndLSN)
	require.Less(t, commitOf(second).EndLSN, commitOf(third).EndLSN)

	bound := first[1].(*replication.Insert)
	require.Greater(t, bound.LSN, second[1].(*replication.Insert).LSN, "LSNs of changes go back")
	// a's subtransaction has another id, but Begin names the transaction's.
	var reference uint64
	require.NoError(t, c.pool.QueryRow(ctx, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8`).Scan(&reference))
	require.Equal(t, xid, replication.WidenXID(second[0].(*replication.Begin).XID, reference))
}

// A table that is altered is described again before its next change.
func TestReplicationRelationChanges(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id int PRIMARY KEY)`)
	reader := c.stream(replication.Options{})
	c.exec(`INSERT INTO t VALUES (1)`)
	first := transaction(t, reader)[1].(*replication.Insert)
	require.Len(t, first.Relation.Columns, 1)

	tx, err := c.pool.Begin(t.Context())
	require.NoError(t, err)
	for _, sql := range []string{
		`INSERT INTO t VALUES (2)`, `ALTER TABLE t ADD COLUMN note text DEFAULT 'x'`, `INSERT INTO t VALUES (3)`,
		`ALTER TABLE t RENAME TO u`, `INSERT INTO u VALUES (4, 'y')`, `ALTER TABLE u DROP COLUMN note`, `INSERT INTO u VALUES (5)`,
	} {
		_, err := tx.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	require.NoError(t, tx.Commit(t.Context()))
	events := transaction(t, reader)
	require.Equal(t, []string{"2", "3", "4", "5"}, inserted(events))
	require.Equal(t, first.Relation, events[1].(*replication.Insert).Relation)
	require.Equal(t, []string{"3", "x"}, texts(events[2].(*replication.Insert).New))
	require.Equal(t, "note", events[2].(*replication.Insert).Relation.Columns[1].Name)
	last := events[4].(*replication.Insert).Relation
	require.Equal(t, "u", last.Name)
	require.Equal(t, first.Relation.OID, last.OID)
	require.Len(t, last.Columns, 1)
	require.Len(t, first.Relation.Columns, 1, "a relation that was kept does not change")
}

// Values of text do not depend on the defaults of the database.
func TestReplicationTextStyles(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id float8, at date, i interval, word text);
		DO $$ BEGIN
			EXECUTE format('ALTER DATABASE %I SET datestyle = ''SQL, DMY''', current_database());
			EXECUTE format('ALTER DATABASE %I SET intervalstyle = ''sql_standard''', current_database());
			EXECUTE format('ALTER DATABASE %I SET extra_float_digits = ''-5''', current_database());
			EXECUTE format('ALTER DATABASE %I SET client_encoding = ''latin1''', current_database());
		END $$`)
	reader := c.stream(replication.Options{})
	c.exec(`INSERT INTO t VALUES (0.1::float8 + 0.2, '2024-02-03', '1 day 2 hours', U&'\00e4')`)
	require.Equal(t, []string{"0.30000000000000004", "2024-02-03", "1 day 02:00:00", "ä"},
		texts(transaction(t, reader)[1].(*replication.Insert).New))
}

// TestReplicationRecord writes what a server sends into files from which the
// decoder's tests read it, if the environment names a folder.
func TestReplicationRecord(t *testing.T) {
	folder := os.Getenv("OUTBOX_TEST_RECORD")
	if folder == "" {
		t.Skip("OUTBOX_TEST_RECORD names no folder")
	}
	for name, options := range map[string]string{
		"text.hex": "", "binary.hex": ", 'binary', 'true'",
	} {
		c := newCapture(t, eventTables)
		c.exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, c.slot)
		replicated, err := pgx.Connect(t.Context(), c.url)
		require.NoError(t, err)
		// One by one: to be a replica is a property of the session.
		for _, sql := range []string{
			`SELECT pg_replication_origin_create('upstream')`, `SELECT pg_replication_origin_session_setup('upstream')`,
			`BEGIN; SELECT pg_replication_origin_xact_setup('1/23', now()); INSERT INTO things VALUES (100, 'replicated'); COMMIT`,
			`SELECT pg_replication_origin_session_reset()`, `SELECT pg_replication_origin_drop('upstream')`,
		} {
			_, err := replicated.Exec(t.Context(), sql)
			require.NoError(t, err, sql)
		}
		require.NoError(t, replicated.Close(t.Context()))
		makeEvents(c)
		rows, err := c.pool.Query(t.Context(), `SELECT data FROM pg_logical_slot_get_binary_changes($1, NULL, NULL,
			'proto_version', '1', 'messages', 'true', 'publication_names', $2`+options+`)`, c.slot, pgx.Identifier{oddPublication}.Sanitize())
		require.NoError(t, err)
		messages, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
		require.NoError(t, err)
		var text bytes.Buffer
		for _, message := range messages {
			fmt.Fprintln(&text, hex.EncodeToString(message))
		}
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), text.Bytes(), 0o644))
	}
}
