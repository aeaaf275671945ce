package tests

import (
	"context"
	"database/sql"
	"maps"
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// pgxHandle is what a publisher needs of pgx's handles.
type pgxHandle interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, source pgx.CopyFromSource) (int64, error)
}

// Applications, and watermill-sql's adapters, hand transactions around in types
// of their own.
type (
	pgxTxOfAnApplication struct{ pgx.Tx }
	sqlTxOfAnApplication struct{ *sql.Tx }
)

// handle is a database handle under test.
type handle struct {
	db any
	// end commits or rolls back; nil if the handle is no transaction.
	end func(commit bool) error
}

type handleKind = func(t *testing.T, f *fixture) handle

// rawEnd, pgxEnd and sqlEnd end what was begun in these ways.
func rawEnd(ctx context.Context, conn pgxHandle) func(commit bool) error {
	return func(commit bool) error {
		_, err := conn.Exec(ctx, map[bool]string{true: "COMMIT", false: "ROLLBACK"}[commit])
		return err
	}
}

func pgxEnd(ctx context.Context, tx pgx.Tx) func(commit bool) error {
	return func(commit bool) error {
		if commit {
			return tx.Commit(ctx)
		}
		return tx.Rollback(ctx)
	}
}

func sqlEnd(tx *sql.Tx) func(commit bool) error {
	return func(commit bool) error {
		if commit {
			return tx.Commit()
		}
		return tx.Rollback()
	}
}

// sqlDrivers are the drivers for database/sql, in the ways they send parameters.
var sqlDrivers = map[string]struct{ driver, parameter, value string }{
	"pgx stdlib":                  {driver: "pgx"},
	"pgx stdlib, simple protocol": {"pgx", "default_query_exec_mode", "simple_protocol"},
	"lib/pq":                      {driver: "postgres"},
	"lib/pq, binary parameters":   {"postgres", "binary_parameters", "yes"},
}

// plainHandles opens a handle of each kind that writes at once.
func plainHandles() map[string]handleKind {
	kinds := map[string]handleKind{
		"*pgxpool.Pool": func(t *testing.T, f *fixture) handle { return handle{db: pgtest.Pool(t, f.url)} },
		"*pgx.Conn":     func(t *testing.T, f *fixture) handle { return handle{db: f.connect(t)} },
		"*pgxpool.Conn": func(t *testing.T, f *fixture) handle {
			conn, err := pgtest.Pool(t, f.url).Acquire(t.Context())
			require.NoError(t, err)
			t.Cleanup(conn.Release)
			return handle{db: conn}
		},
	}
	for name, d := range sqlDrivers {
		kinds["*sql.DB with "+name] = func(t *testing.T, f *fixture) handle {
			return handle{db: openSQL(t, d.driver, withParameter(t, f.url, d.parameter, d.value))}
		}
		kinds["*sql.Conn with "+name] = func(t *testing.T, f *fixture) handle {
			conn, err := openSQL(t, d.driver, withParameter(t, f.url, d.parameter, d.value)).Conn(t.Context())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, conn.Close()) })
			return handle{db: conn}
		}
	}
	return kinds
}

// txHandles opens a handle of each kind that waits for somebody's commit. None
// uses the fixture's pool, which the subtests share.
func txHandles() map[string]handleKind {
	kinds := map[string]handleKind{
		"*pgx.Conn after BEGIN": func(t *testing.T, f *fixture) handle {
			conn := f.connect(t)
			_, err := conn.Exec(t.Context(), "BEGIN")
			require.NoError(t, err)
			return handle{conn, rawEnd(t.Context(), conn)}
		},
		"*pgxpool.Conn after BEGIN": func(t *testing.T, f *fixture) handle {
			conn, err := pgtest.Pool(t, f.url).Acquire(t.Context())
			require.NoError(t, err)
			t.Cleanup(conn.Release)
			_, err = conn.Exec(t.Context(), "BEGIN")
			require.NoError(t, err)
			return handle{conn, rawEnd(t.Context(), conn)}
		},
		"pgx.Tx": func(t *testing.T, f *fixture) handle {
			tx, err := f.connect(t).Begin(t.Context())
			require.NoError(t, err)
			return handle{tx, pgxEnd(t.Context(), tx)}
		},
		"*pgxpool.Tx": func(t *testing.T, f *fixture) handle {
			tx, err := pgtest.Pool(t, f.url).Begin(t.Context())
			require.NoError(t, err)
			return handle{tx, pgxEnd(t.Context(), tx)}
		},
		"savepoint": func(t *testing.T, f *fixture) handle {
			tx, err := f.connect(t).Begin(t.Context())
			require.NoError(t, err)
			savepoint, err := tx.Begin(t.Context())
			require.NoError(t, err)
			return handle{savepoint, func(commit bool) error {
				// The savepoint is lost, or kept in a transaction that commits.
				if err := pgxEnd(t.Context(), savepoint)(commit); err != nil {
					return err
				}
				return tx.Commit(t.Context())
			}}
		},
		"type with a pgx.Tx": func(t *testing.T, f *fixture) handle {
			tx, err := f.connect(t).Begin(t.Context())
			require.NoError(t, err)
			return handle{pgxTxOfAnApplication{tx}, pgxEnd(t.Context(), tx)}
		},
	}
	for name, d := range sqlDrivers {
		kinds["*sql.Tx with "+name] = func(t *testing.T, f *fixture) handle {
			tx, err := openSQL(t, d.driver, withParameter(t, f.url, d.parameter, d.value)).BeginTx(t.Context(), nil)
			require.NoError(t, err)
			return handle{tx, sqlEnd(tx)}
		}
		kinds["type with an *sql.Tx of "+name] = func(t *testing.T, f *fixture) handle {
			tx, err := openSQL(t, d.driver, withParameter(t, f.url, d.parameter, d.value)).BeginTx(t.Context(), nil)
			require.NoError(t, err)
			return handle{&sqlTxOfAnApplication{tx}, sqlEnd(tx)}
		}
	}
	return kinds
}

// variety returns n messages that are different in every way a message can be.
func variety(n int) []*message.Message {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	messages := make([]*message.Message, n)
	for i := range messages {
		uuid := strconv.Itoa(i)
		switch i % 5 {
		case 0:
			messages[i] = withMetadata(uuid, every, message.Metadata{
				`quote"`: `'single' "double"`, `back\slash`: `\\`, "control": "\x01\b\t\r\n\x1f\x7f", "unicode": "é 值 🙂 \u2028", "": "",
				"json": `{"a":"\u0041"}`, "array": `{"a",NULL,b}`,
			})
		case 1:
			messages[i] = withMetadata(uuid, nil, nil)
		case 2:
			messages[i] = withMetadata(uuid+` "\'{},NULL`, []byte{}, message.Metadata{})
		case 3:
			messages[i] = withMetadata(uuid, []byte(`\x00`), message.Metadata{outbox.DefaultKeyMetadata: `NULL "\'`})
		case 4:
			messages[i] = withMetadata(uuid, []byte("NULL"), message.Metadata{outbox.DefaultKeyMetadata: "NULL"})
		}
	}
	return messages
}

// Field case F108. Drivers differ in formats, in what a nil means and in the
// type of an array; whatever works with one must work with each.
func TestPublishThroughEachHandle(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	kinds := plainHandles()
	maps.Copy(kinds, txHandles())
	for kind, open := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()

			var sent []*message.Message
			for name, n := range callSizes {
				h := open(t, f)
				messages := variety(n)
				require.NoError(t, publisherOn(t, h.db, outbox.PublisherConfig{}).Publish(kind, messages...), name)
				if h.end != nil {
					f.requireStored(t, kind, sent)
					require.NoError(t, h.end(true))
				}
				sent = append(sent, messages...)
				f.requireStored(t, kind, sent)
			}
			for i, row := range f.stored(t, kind) {
				if key := sent[i].Metadata.Get(outbox.DefaultKeyMetadata); key != "" {
					require.NotNil(t, row.Key)
					require.Equal(t, key, *row.Key)
				} else {
					require.Nil(t, row.Key)
				}
			}
			_, delivered := f.subscribe(consumer, outbox.SubscriberConfig{}, kind)
			requireDelivered(t, delivered, sent)
		})
	}
}

// Field case F46. With a pooler in front of the server pgx has to do without
// prepared statements, and then guesses types from Go's: bytes for a JSON column
// went out as the text of a bytea, and nothing could be published any more.
func TestPublishInEachQueryMode(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()

			pool := pgtest.Pool(t, withParameter(t, f.url, "default_query_exec_mode", mode))
			publisher := publisherOn(t, pool, outbox.PublisherConfig{})
			var sent []*message.Message
			for name, n := range callSizes {
				messages := variety(n)
				require.NoError(t, publisher.Publish(mode, messages...), name)
				sent = append(sent, messages...)
			}
			f.requireStored(t, mode, sent)
			_, delivered := f.subscribe(consumer, outbox.SubscriberConfig{}, mode)
			requireDelivered(t, delivered, sent)
		})
	}
}

// The caller ends the transaction, and its end decides.
func TestPublishThroughEachTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	byContext := f.publisher(outbox.PublisherConfig{RequireTx: true})
	for kind, open := range txHandles() {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()

			for name, n := range callSizes {
				for _, commit := range []bool{false, true} {
					topic := kind + " " + name + " " + strconv.FormatBool(commit)
					h := open(t, f)
					bound := publisherOn(t, h.db, outbox.PublisherConfig{RequireTx: true})
					messages := variety(3 * n)

					require.NoError(t, bound.Publish(topic, messages[:n]...))
					require.NoError(t, publishIn(t.Context(), byContext, h.db, topic, messages[n:2*n]...))
					// Bad input is refused before it can hurt the transaction.
					require.ErrorIs(t, bound.Publish(topic, message.NewMessage("\xff", nil)), outbox.ErrInvalidMessage)
					require.NoError(t, bound.Publish(topic, messages[2*n:]...))

					require.NoError(t, h.end(commit))
					if commit {
						f.requireStored(t, topic, messages)
					} else {
						require.Empty(t, f.stored(t, topic))
					}
				}
			}
		})
	}
}

// Through database/sql a call is bounded, because the messages travel as array
// literals; the bound is told before anything is sent.
func TestPublishTooManyBytesThroughDatabaseSQL(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := publisherOn(t, openSQL(t, "pgx", f.url), outbox.PublisherConfig{})
	payload := make([]byte, 50<<20) // shared, so that it takes no memory
	messages := make([]*message.Message, 6)
	for i := range messages {
		messages[i] = message.NewMessage("", payload)
	}
	err := publisher.Publish("orders", messages...)
	require.ErrorIs(t, err, outbox.ErrCallTooLarge)
	require.Empty(t, f.stored(t, "orders"))
}
