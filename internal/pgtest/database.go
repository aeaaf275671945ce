package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Database creates a database of the test's own on the shared server and
// returns its URL. When the test ends the database is dropped, along with the
// connections, replication slots and prepared transactions it still has.
func Database(t testing.TB) string {
	t.Helper()
	return DatabaseOn(t, Shared(t))
}

// DatabaseOn is Database on a given server. If that is down when the test ends,
// the database is left to go with the server's folder.
func DatabaseOn(t testing.TB, s *Server) string {
	t.Helper()
	return databaseOn(t, s, "")
}

// DatabaseLike is Database, and a copy of what prepare has made of another one,
// for which it is called once on each server: many copies cost less than as many
// preparations. It is given a URL, and leaves no connection behind. On a server
// that was not started by this process, where the original would be left behind,
// prepare is called for each.
func DatabaseLike(t testing.TB, original *Original) string {
	t.Helper()
	s := Shared(t)
	if !s.Owned() {
		url := DatabaseOn(t, s)
		if err := original.Prepare(t.Context(), url); err != nil {
			t.Fatalf("pgtest: prepare a database: %v", err)
		}
		return url
	}
	original.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), cleanupTimeout)
		defer cancel()
		original.name = databaseName("original")
		original.err = errors.Join(createDatabase(ctx, s, original.name, ""), original.Prepare(ctx, s.URLFor(original.name)))
	})
	if original.err != nil {
		t.Fatalf("pgtest: prepare a database: %v", original.err)
	}
	return databaseOn(t, s, original.name)
}

// Original is a database that others are copies of. Safe for concurrent use.
type Original struct {
	// Prepare makes of an empty database what is to be copied.
	Prepare func(ctx context.Context, url string) error

	once sync.Once
	name string
	err  error
}

func databaseOn(t testing.TB, s *Server, original string) string {
	t.Helper()
	name := databaseName(t.Name())
	ctx, cancel := context.WithTimeout(t.Context(), cleanupTimeout)
	defer cancel()
	if err := createDatabase(ctx, s, name, original); err != nil {
		t.Fatalf("pgtest: create database %s: %v", name, err)
	}
	t.Cleanup(func() {
		if s.Owned() && s.sup.running() == nil {
			return
		}
		// The test's own context has ended by now.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), cleanupTimeout)
		defer cancel()
		if err := dropDatabase(ctx, s, name); err != nil {
			t.Errorf("pgtest: drop database %s: %v", name, err)
		}
	})
	return s.URLFor(name)
}

// databaseName returns a new name that tells which test made the database, and
// fits into the 63 bytes of an identifier.
func databaseName(test string) string {
	readable := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		default:
			return '_'
		}
	}, test)
	return fmt.Sprintf("%.40s_%s", readable, strings.ToLower(rand.Text()[:16]))
}

// createDatabase makes a copy of original, "" for an empty one.
func createDatabase(ctx context.Context, s *Server, name, original string) error {
	return withConn(ctx, s.URL(), func(admin *pgx.Conn) error {
		sql := "CREATE DATABASE " + pgx.Identifier{name}.Sanitize()
		// Copying files needs checkpoints, which are cheap without fsync and
		// leave it at a third of the default strategy's time.
		if original != "" {
			sql += " TEMPLATE " + pgx.Identifier{original}.Sanitize()
		}
		if s.Owned() && majorVersion(admin.PgConn()) >= 15 {
			sql += " STRATEGY file_copy"
		}
		_, err := admin.Exec(ctx, sql)
		return err
	})
}

// majorVersion returns 15 for "15.4 (Debian 15.4-1)" and "15beta1".
func majorVersion(conn *pgconn.PgConn) int {
	digits := number.FindString(conn.ParameterStatus("server_version"))
	major, err := strconv.Atoi(digits)
	if err != nil {
		return 0
	}
	return major
}

// dropDatabase drops a database with all that would keep it from being dropped.
func dropDatabase(ctx context.Context, s *Server, name string) error {
	return withConn(ctx, s.URL(), func(admin *pgx.Conn) error {
		if err := rollBackPrepared(ctx, admin, s.URLFor(name), name); err != nil {
			return err
		}
		if err := dropSlots(ctx, admin, name); err != nil {
			return err
		}
		_, err := admin.Exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
		return err
	})
}

// rollBackPrepared rolls back the prepared transactions in the database name,
// which only a session of that database (url) can do.
func rollBackPrepared(ctx context.Context, admin *pgx.Conn, url, name string) error {
	rows, err := admin.Query(ctx, "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = $1", name)
	if err != nil {
		return fmt.Errorf("list its prepared transactions: %w", err)
	}
	gids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("list its prepared transactions: %w", err)
	}
	if len(gids) == 0 {
		return nil
	}
	return withConn(ctx, url, func(conn *pgx.Conn) error {
		for _, gid := range gids {
			// A parameter is not possible there.
			if _, err := conn.Exec(ctx, "ROLLBACK PREPARED '"+strings.ReplaceAll(gid, "'", "''")+"'"); err != nil {
				return fmt.Errorf("roll back prepared transaction %q: %w", gid, err)
			}
		}
		return nil
	})
}

// dropSlots drops the logical replication slots of the database name. A slot in
// use can be dropped only when its walsender has gone, which takes a moment
// after its termination.
func dropSlots(ctx context.Context, admin *pgx.Conn, name string) error {
	for {
		var left int
		err := admin.QueryRow(ctx, "SELECT count(*) FROM pg_catalog.pg_replication_slots WHERE database = $1", name).Scan(&left)
		if err != nil {
			return fmt.Errorf("count its replication slots: %w", err)
		}
		if left == 0 {
			return nil
		}
		_, err = admin.Exec(ctx, `SELECT pg_catalog.pg_terminate_backend(active_pid) FROM pg_catalog.pg_replication_slots
			WHERE database = $1 AND active`, name)
		if err != nil {
			return fmt.Errorf("end the users of its replication slots: %w", err)
		}
		_, err = admin.Exec(ctx, `SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_catalog.pg_replication_slots
			WHERE database = $1 AND NOT active`, name)
		switch {
		case err == nil:
		case hasCode(err, "55006"), hasCode(err, "42704"):
			// object_in_use, undefined_object: a slot has found a user, or is
			// gone. Look again.
		default:
			return fmt.Errorf("drop its replication slots: %w", err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d replication slots are still in use: %w", left, context.Cause(ctx))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// withConn calls f with a connection and closes it.
func withConn(ctx context.Context, url string, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	return errors.Join(f(conn), conn.Close(ctx))
}
