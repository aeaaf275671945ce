package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// What belongs to a running server alone, and is not copied: its lock file, and
// what is in these folders, which it fills anew.
var (
	ownFiles   = []string{"postmaster.pid", "postmaster.opts"}
	ownFolders = []string{"pg_dynshmem", "pg_notify", "pg_replslot", "pg_serial", "pg_snapshots", "pg_stat_tmp", "pg_subtrans"}
)

const walFolder = "pg_wal"

var controlFile = filepath.Join("global", "pg_control")

// backup copies the data of s, which runs, for a standby that is going to be
// sup's. It does what pg_basebackup does, by the functions that are there for it:
// downloaded programs lack that one, and the one of another version refuses.
func (s *Server) backup(ctx context.Context, sup *supervisor) error {
	data := filepath.Join(sup.folder, "data")
	return withConn(ctx, s.URL(), func(conn *pgx.Conn) error {
		// A slot, which ends with the connection, keeps the WAL that is written
		// meanwhile, and what the standby streams at first.
		slot := "pgtest_" + strings.ToLower(rand.Text())
		if _, err := conn.Exec(ctx, "SELECT pg_catalog.pg_create_physical_replication_slot($1, true, true)", slot); err != nil {
			return fmt.Errorf("pgtest: keep the WAL for a copy of the server: %w", err)
		}
		begin, end := "SELECT pg_catalog.pg_backup_start('pgtest', true)", "SELECT labelfile FROM pg_catalog.pg_backup_stop(false)"
		if majorVersion(conn.PgConn()) < 15 {
			begin, end = "SELECT pg_catalog.pg_start_backup('pgtest', true, false)", "SELECT labelfile FROM pg_catalog.pg_stop_backup(false, false)"
		}
		if _, err := conn.Exec(ctx, begin); err != nil {
			return fmt.Errorf("pgtest: begin a copy of the server: %w", err)
		}
		if err := copyData(ctx, s.DataDir(), data); err != nil {
			return err
		}
		var label string
		if err := conn.QueryRow(ctx, end).Scan(&label); err != nil {
			return fmt.Errorf("pgtest: end a copy of the server: %w", err)
		}
		// What recovery needs to be as it is at the end.
		for _, name := range []string{walFolder, controlFile} {
			if err := copyFolder(ctx, s.DataDir(), data, name, nil); err != nil {
				return err
			}
		}
		conninfo := fmt.Sprintf("primary_conninfo = 'user=postgres host=127.0.0.1 port=%d sslmode=disable'\n", s.Port())
		return errors.Join(
			addFile(filepath.Join(data, "backup_label"), label),
			addFile(filepath.Join(data, "standby.signal"), ""),
			addFile(filepath.Join(data, "postgresql.auto.conf"), conninfo),
		)
	})
}

// copyData copies the data of a running server, without its WAL and control file.
func copyData(ctx context.Context, from, to string) error {
	return copyFolder(ctx, from, to, ".", func(name string) bool {
		if name == controlFile || slices.Contains(ownFiles, name) {
			return true
		}
		return slices.Contains(append(ownFolders, walFolder), filepath.Dir(name))
	})
}

// copyFolder copies what is called name, and all that is in it, from one folder to
// the other, except what skip says. A file that vanishes meanwhile is one that
// recovery does without.
func copyFolder(ctx context.Context, from, to, name string, skip func(name string) bool) error {
	err := filepath.WalkDir(filepath.Join(from, name), func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err := errors.Join(err, context.Cause(ctx)); err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, name)
		switch {
		case skip != nil && skip(name):
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		case entry.IsDir():
			if err := os.Mkdir(target, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			return giveAway(target)
		}
		if err := copyFile(path, target); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("pgtest: copy the server's data: %w", err)
	}
	return nil
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = source.Close() }()
	target, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(target, source)
	return errors.Join(err, target.Close(), giveAway(to))
}

// addFile writes a text to the end of a file of the server's.
func addFile(path, text string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("pgtest: set up the standby: %w", err)
	}
	_, err = f.WriteString(text)
	if err := errors.Join(err, f.Close(), giveAway(path)); err != nil {
		return fmt.Errorf("pgtest: set up the standby: %w", err)
	}
	return nil
}
