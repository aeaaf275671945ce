package tests

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/promote"
	"github.com/millrace/watermill-outbox/schema"
)

// refuse has the log refuse messages that are called "bad" and something, in one
// of the ways there are, until accept.
func (f *fixture) refuse(body string) {
	f.t.Helper()
	f.exec(`CREATE TABLE public.refusing AS SELECT true;
		GRANT SELECT ON public.refusing TO PUBLIC;
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF EXISTS (SELECT FROM public.refusing) THEN ` + body + ` END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON outbox.messages FOR EACH ROW WHEN (NEW.uuid LIKE 'bad%') EXECUTE FUNCTION refuse()`)
}

// accept ends refuse. It leaves the trigger where it is, since taking it away and
// inserting lock the partitions in different orders.
func (f *fixture) accept() {
	f.t.Helper()
	f.exec("DELETE FROM public.refusing")
}

// One message that can never be inserted is first in the queue, and the whole
// queue waits for it for ever. Here it is put off, with its reason; the others are
// moved, in order.
func TestScheduledBadRowsBlockNothing(t *testing.T) {
	t.Parallel()

	for name, body := range map[string]string{
		"raises":             `RAISE EXCEPTION 'not this one: %', NEW.uuid;`,
		"breaks":             `PERFORM 1 / 0;`,
		"lacks a privilege":  `RAISE insufficient_privilege;`,
		"is out of memory":   `RAISE out_of_memory;`,
		"has no such column": `PERFORM no_such_column;`,
		"takes for ever":     `PERFORM pg_sleep(3600);`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			f.refuse(body)
			n, bad := 1500, []int32{1, 700, 701, 1500}
			slow := name == "takes for ever"
			if slow {
				n, bad = 100, []int32{50} // it takes a while to find each, and the others must not seem as slow
			}
			f.exec(`INSERT INTO outbox.deferred (due_at, topic, uuid)
				SELECT now() - make_interval(secs => 10000 - g), 'orders', CASE WHEN g = ANY ($1::int[]) THEN 'bad ' ELSE '' END || g
				FROM generate_series(1, $2::int) g`, bad, n)
			_, book := f.runPromoter(t, f.pool, func(c *promote.Config) {
				if slow {
					c.Timeout = 500 * time.Millisecond
				}
			})
			const text = "Cannot move a message into the log"
			require.Eventually(t, func() bool {
				told := map[any]bool{}
				for _, entry := range book.find(text) {
					told[entry.Fields["message_uuid"]] = true
				}
				return len(told) >= len(bad) && f.number("SELECT count(*)::int FROM outbox.messages") == n-len(bad)
			}, 2*waitFor, 5*time.Millisecond)
			last := 0
			for _, uuid := range f.storedUUIDs(t, "orders") {
				n, err := strconv.Atoi(uuid)
				require.NoError(t, err)
				if !slow { // a busy machine may make any row so
					require.Greater(t, n, last)
				}
				last = n
			}
			rows := f.deferred(t, "orders")
			require.Len(t, rows, len(bad))
			for _, row := range rows {
				require.Positive(t, row.Failures)
				require.NotNil(t, row.Error)
				require.NotEmpty(t, *row.Error)
				logged := 0
				for _, entry := range book.find(text) {
					if entry.Fields["message_uuid"] == row.UUID {
						logged++
						require.Equal(t, logged, entry.Fields["failures"], "once for each failure")
						require.Error(t, entry.Err)
					}
				}
				require.Positive(t, logged)
			}
			if name == "raises" {
				require.Contains(t, *rows[0].Error, "not this one: bad 1")
			}

			// When it can be moved it is.
			f.accept()
			f.exec("UPDATE outbox.deferred SET due_at = now()")
			f.awaitDeferred(t, 0)
			require.Len(t, f.storedUUIDs(t, "orders"), n)
		})
	}
}

// runPromoter runs a promoter until the test ends.
func (f *fixture) runPromoter(t testing.TB, db promote.Querier, change func(*promote.Config)) (*promote.Promoter, *logBook) {
	t.Helper()
	promoter, book := f.promoter(db, change)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		promoter.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return promoter, book
}

// The due times of rows that fail again grow apart.
func TestScheduledBadRowIsPutOffForLonger(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.refuse(`RAISE EXCEPTION 'no';`)
	f.exec("INSERT INTO outbox.deferred (due_at, topic, uuid) VALUES (now(), 'orders', 'bad')")
	promoter, _ := f.promoter(f.pool, nil)
	var last float64
	for failures := 1; failures <= 12; failures++ {
		f.promote(t, promoter)
		var have int
		var in float64
		require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT failures, extract(epoch FROM due_at - clock_timestamp())::float8 FROM outbox.deferred")).Scan(&have, &in))
		require.Equal(t, failures, have)
		if failures <= 8 {
			require.Greater(t, in, last)
		}
		require.LessOrEqual(t, in, 300.0)
		last = in
		f.exec("UPDATE outbox.deferred SET due_at = now()")
	}
	require.Greater(t, last, 200.0)
}

// Two processes come upon the same bad row: it fails once.
func TestScheduledBadRowOfTwoProcesses(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.refuse(`RAISE EXCEPTION 'no';`)
	f.exec("INSERT INTO outbox.deferred (due_at, topic, uuid) VALUES (now(), 'orders', 'bad')")
	other, _ := f.promoter(f.pool, nil)
	meddled := false
	db := querierFunc(func(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
		if len(args) == 4 && !meddled { // the note of the failure
			meddled = true
			f.promote(t, other)
		}
		return f.pool.Query(ctx, sql, args...)
	})
	promoter, book := f.promoter(db, nil)
	f.promote(t, promoter)
	require.True(t, meddled)
	require.Equal(t, 1, f.deferred(t, "orders")[0].Failures)
	require.Empty(t, book.errors(), "the other one has said it")
}

// Field case F89. One error of the database, or one panic, ended the task that
// looks for what is due, until the next restart.
func TestScheduledLoopSurvives(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	var n atomic.Int64
	db := querierFunc(func(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
		switch n.Add(1) {
		case 2:
			return nil, errors.New("injected")
		case 4:
			panic("injected")
		case 6:
			return f.pool.Query(ctx, "SELECT 1/0")
		case 8:
			return f.pool.Query(ctx, "SELECT 1")
		}
		return f.pool.Query(ctx, sql, args...)
	})
	_, book := f.runPromoter(t, db, nil)
	book.await(t, 3, "Cannot move messages that are due")
	publisher := f.publisher(outbox.PublisherConfig{})
	var sent []*message.Message
	for i := range 10 {
		sent = append(sent, dueIn(time.Duration(i+1)*50*time.Millisecond))
	}
	require.NoError(t, publisher.Publish("orders", sent...))
	f.awaitDeferred(t, 0)
	require.Equal(t, uuids(sent), f.storedUUIDs(t, "orders"))
	require.Contains(t, book.find("Cannot move messages that are due")[1].Err.Error(), "panic: injected")
}

// The same in a Consumer: the table is away for a moment, the sessions are killed,
// a privilege is taken away and given back.
func TestScheduledConsumerSurvives(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	db, err := pgxpool.ParseConfig(f.urlAs(role))
	require.NoError(t, err)
	consumer, book := f.loggedConsumer(db, nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "orders")
	publisher := f.publisher(outbox.PublisherConfig{})
	publish := func() *message.Message {
		msg := dueIn(20 * time.Millisecond)
		require.NoError(t, publisher.Publish("orders", msg))
		return msg
	}
	requireNext(t, messages, publish())

	f.exec("ALTER TABLE outbox.deferred RENAME TO away")
	book.await(t, 1, "Cannot move")
	f.exec("ALTER TABLE outbox.away RENAME TO deferred")
	requireNext(t, messages, publish())

	f.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
		AND application_name = 'watermill-outbox'`)
	requireNext(t, messages, publish())

	before := len(book.find("Cannot move"))
	f.exec("REVOKE INSERT ON outbox.messages FROM " + quoteIdentifier(role))
	f.exec("REVOKE INSERT (topic, key, uuid, metadata, payload, target_group, attempt) ON outbox.messages FROM " + quoteIdentifier(role))
	msg := publish()
	book.await(t, before+1, "Cannot move")
	f.grant(schema.Roles{Consumer: role})
	requireNext(t, messages, msg)
}
