package schema

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

//go:embed migrations/*.sql
var files embed.FS

// A migration is one embedded file; its version is its place in the list.
type migration struct {
	version int
	name    string
	text    string
}

// migrations holds the embedded files in order. They are part of the binary:
// a gap or a misnamed file is a mistake of ours, found by the first test.
var migrations = func() []migration {
	entries, err := fs.ReadDir(files, "migrations")
	if err != nil {
		panic(err)
	}
	list := make([]migration, len(entries))
	for i, entry := range entries {
		text, err := files.ReadFile("migrations/" + entry.Name())
		if err != nil {
			panic(err)
		}
		name := strings.TrimSuffix(entry.Name(), ".sql")
		if !strings.HasPrefix(name, fmt.Sprintf("%04d_", i+1)) {
			panic("schema: migration files must be numbered without gaps, have " + entry.Name())
		}
		list[i] = migration{version: i + 1, name: name[5:], text: string(text)}
	}
	return list
}()

// Version is the version of the tables this library works with.
var Version = len(migrations)

// Beginner begins a transaction. *pgx.Conn and *pgxpool.Pool do.
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Migrate brings the schema to Version: it creates the schema if need be and
// applies what is missing, in one transaction. It is safe to call from many
// processes at once, and does nothing but one read when nothing is missing.
//
// The role needs CREATE on the database (or the schema to exist already with
// CREATE on it; then the server sends a warning, and there is no publication:
// see PublicationSQL). A database migrated by a newer library is refused with a
// *VersionError; a failing migration is a *MigrationError and leaves nothing
// behind. The context governs the whole call, waiting for other callers
// included.
//
// Where the application must not hold such rights, let somebody else run the
// script that SQL returns.
func Migrate(ctx context.Context, db Beginner, cfg Config) error {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return err
	}
	tx, err := db.Begin(ctx)
	if err != nil {
		return fmt.Errorf("schema %q: begin migration: %w", cfg.Name, err)
	}
	// After Commit this is a no-op; after a failure or a cancelled context
	// pgx closes a connection it cannot roll back.
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()

	have, err := lockAndRead(ctx, tx, cfg.Name)
	if err != nil {
		return err
	}
	if have > Version {
		return &VersionError{Schema: cfg.Name, Have: have, Want: Version}
	}
	if have == Version {
		return nil
	}
	if have == 0 {
		if err := createSchema(ctx, tx, cfg.Name); err != nil {
			return err
		}
	}
	for _, m := range migrations[have:] {
		if _, err := tx.Exec(ctx, m.script(cfg)); err != nil {
			return &MigrationError{Schema: cfg.Name, Version: m.version, Name: m.name, Err: err}
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("schema %q: commit migration: %w", cfg.Name, err)
	}
	return nil
}

// LockKey is the key of the transaction-level advisory lock that Migrate holds,
// one per schema name. Advisory locks belong to a database, so two databases
// of a server do not wait for each other.
func LockKey(name string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte("watermill-outbox/migrate/" + name))
	return int64(h.Sum64()) //nolint:gosec // all 64 bits are wanted, the sign means nothing
}

// lockAndRead waits for the lock and returns the installed version, 0 if none.
func lockAndRead(ctx context.Context, tx pgx.Tx, name string) (int, error) {
	// The isolation is named, since a database whose default is serializable
	// would read the version with a snapshot from before the wait.
	if _, err := tx.Exec(ctx, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"); err != nil {
		return 0, fmt.Errorf("schema %q: %w", name, err)
	}
	if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", LockKey(name)); err != nil {
		return 0, fmt.Errorf("schema %q: wait for other migrations: %w", name, err)
	}
	version, err := ReadVersion(ctx, PgxRow(tx), name)
	if errors.Is(err, ErrNotInstalled) {
		return 0, nil
	}
	return version, err
}

// createSchema creates the schema unless it is there: a role without CREATE on
// the database may have been given an empty one.
func createSchema(ctx context.Context, tx pgx.Tx, name string) error {
	var exists bool
	err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)", name).Scan(&exists)
	if err != nil {
		return fmt.Errorf("schema %q: look for schema: %w", name, err)
	}
	if exists {
		return nil
	}
	if _, err := tx.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{name}.Sanitize()); err != nil {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && pgErr.Code == "42501" { // insufficient_privilege
			return fmt.Errorf("schema %q: the role may not create it: grant CREATE on the database, or let an administrator run the script printed by schema.SQL: %w", name, err)
		}
		return fmt.Errorf("schema %q: create: %w", name, err)
	}
	return nil
}

// script is the migration's SQL followed by the note that it was applied.
func (m migration) script(cfg Config) string {
	note := fmt.Sprintf("\nINSERT INTO outbox.meta (key, value) VALUES ('version', '%d')\n"+
		"    ON CONFLICT (key) DO UPDATE SET value = excluded.value;\n", m.version)
	return fill(cfg.Name, m.text+note, map[string]string{
		"partition_interval": fmt.Sprintf("'%d'", int64(cfg.PartitionInterval.Seconds())),
		"look_ahead":         fmt.Sprintf("'%d'", int64(cfg.LookAhead.Seconds())),
	})
}

// SQL returns the script that brings a schema from version `from` (0: nothing
// there) to Version: one transaction under the same lock that Migrate takes,
// for psql or a migration tool of the user's own. It fails by itself, changing
// nothing, when the schema is at another version than `from`.
func SQL(cfg Config, from int) (string, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return "", err
	}
	if from < 0 || from > Version {
		return "", fmt.Errorf("schema: there is no version %d to start from: give 0 (nothing installed) to %d", from, Version)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "BEGIN;\nSET TRANSACTION ISOLATION LEVEL READ COMMITTED;\nSELECT pg_advisory_xact_lock(%d);\n\n", LockKey(cfg.Name))
	if from == 0 {
		fmt.Fprintf(&b, "CREATE SCHEMA IF NOT EXISTS %s;\n\n", pgx.Identifier{cfg.Name}.Sanitize())
	} else {
		// Division by zero is the shortest portable way to stop a script.
		b.WriteString(Text(cfg.Name, fmt.Sprintf(
			"-- Stops with a division by zero unless the schema is at version %d.\n"+
				"SELECT 1 / count(*) FROM outbox.meta WHERE key = 'version' AND value = '%d';\n\n", from, from)))
	}
	for _, m := range migrations[from:] {
		b.WriteString(m.script(cfg))
		b.WriteByte('\n')
	}
	b.WriteString("COMMIT;\n")
	return b.String(), nil
}
