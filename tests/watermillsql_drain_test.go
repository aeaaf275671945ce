package tests

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
	"github.com/millrace/watermill-outbox/schema/watermillsql"
)

// drainIn calls Drain in a transaction of the test's.
func drainIn(t testing.TB, tx *sql.Tx, config watermillsql.DrainConfig) (watermillsql.Drained, error) {
	t.Helper()
	config.Schema = oddSchema
	return watermillsql.Drain(t.Context(), tx, config)
}

// drain calls Drain in a transaction of its own, which commits.
func drain(t testing.TB, db *sql.DB, config watermillsql.DrainConfig) watermillsql.Drained {
	t.Helper()
	tx := begin(t, db)
	drained, err := drainIn(t, tx, config)
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
	return drained
}

// awaitHorizon waits until no transaction is open that is older than the last row
// of an old table. Tests beside this one have theirs on the same server.
func (f *fixture) awaitHorizon(t testing.TB, topic string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return f.number(`SELECT count(*)::int FROM "watermill_`+topic+`" WHERE transaction_id >= pg_snapshot_xmin(pg_current_snapshot())`) == 0
	}, waitFor, 5*time.Millisecond)
}

// What a group has had stays where it is, what is left is moved in order with
// every byte, and the group's position with it: a second run moves nothing, and a
// rolled back one nothing either.
func testWatermillSQLDrainMovesWhatIsLeft(t *testing.T, f *fixture) {
	for _, driver := range oldDrivers {
		for payloadType, sent := range map[string][]*message.Message{"JSON": jsonMessages(50), "BYTEA": variety(50), "TEXT": jsonMessages(50)} {
			topic := strings.ToLower(driver + "-" + payloadType)
			db := openSQL(t, driver, f.url)
			old := oldTable(t, db, topic, payloadType)
			for _, msg := range sent {
				require.NoError(t, old.Publish(topic, msg))
			}
			subscriber := oldSubscriber(t, db, payloadType, 1, waitFor)
			messages, err := subscriber.Subscribe(t.Context(), topic)
			require.NoError(t, err)
			receive(t, messages, 10)
			require.Eventually(t, func() bool { return f.oldLeft(t, topic) == 40 }, waitFor, 5*time.Millisecond)
			require.NoError(t, subscriber.Close())

			position := f.oldPosition(t, topic)
			f.awaitHorizon(t, topic)
			tx := begin(t, db)
			drained, err := drainIn(t, tx, watermillsql.DrainConfig{Topic: topic})
			require.NoError(t, err)
			require.Equal(t, watermillsql.Drained{Moved: 40}, drained)
			require.NoError(t, tx.Rollback())
			require.Empty(t, f.stored(t, topic))
			require.Equal(t, position, f.oldPosition(t, topic))

			require.Equal(t, watermillsql.Drained{Moved: 40}, drain(t, db, watermillsql.DrainConfig{Topic: topic}))
			f.requireStored(t, topic, sent[10:])
			require.Zero(t, f.oldLeft(t, topic))
			require.Equal(t, watermillsql.Drained{}, drain(t, db, watermillsql.DrainConfig{Topic: topic}))
			f.requireStored(t, topic, sent[10:])
			require.Equal(t, 50, f.number(`SELECT count(*)::int FROM "watermill_`+topic+`"`), "the rows stay")
			for i, row := range f.stored(t, topic) {
				if key := sent[10+i].Metadata.Get(outbox.DefaultKeyMetadata); key != "" {
					require.Equal(t, key, *row.Key)
				} else {
					require.Nil(t, row.Key)
				}
			}

			// What is still written there afterwards is what its subscribers get,
			// and the next run moves.
			last := jsonMessages(2)
			require.NoError(t, old.Publish(topic, last[0]))
			subscriber = oldSubscriber(t, db, payloadType, 1, waitFor)
			messages, err = subscriber.Subscribe(t.Context(), topic)
			require.NoError(t, err)
			require.Equal(t, last[0].UUID, receive(t, messages, 1)[0].UUID)
			f.awaitOldPosition(t, topic)
			require.NoError(t, subscriber.Close())
			require.NoError(t, old.Publish(topic, last[1]))
			f.awaitHorizon(t, topic)
			require.Equal(t, watermillsql.Drained{Moved: 1}, drain(t, db, watermillsql.DrainConfig{Topic: topic}))
			f.requireStored(t, topic, append(sent[10:], last[1]))

			_, received := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, topic)
			requireDelivered(t, received, append(sent[10:], last[1]))
		}
	}
}

// Delays are honoured, as a Publisher of ours does; watermill-sql stores null for
// metadata that were never made.
func testWatermillSQLDrainOfDelaysAndEnvelopes(t *testing.T, f *fixture) {
	role := f.role("publisher")
	f.grant(schema.Roles{Publisher: role})
	for _, driver := range oldDrivers {
		for _, payloadType := range []string{"JSON", "JSONB", "BYTEA"} {
			all, now, later := mixed(60)
			for _, msg := range all {
				if msg.Metadata != nil {
					// PostgreSQL finds no NUL in JSON.
					for key, value := range msg.Metadata {
						if strings.Contains(key+value, "\x00") {
							delete(msg.Metadata, key)
						}
					}
					msg.Metadata.Set("order", "1")
				}
			}
			old := strings.ToLower("envelopes-" + driver + payloadType)
			topic := "a topic's \"name\" of " + old
			db := openSQL(t, driver, f.url)
			publisher := oldTable(t, db, old, payloadType)
			for _, outer := range wrapped(t, all, topic) {
				require.NoError(t, publisher.Publish(old, outer))
			}
			// No more privileges than these.
			f.execRaw(`GRANT SELECT, UPDATE ON "watermill_` + old + `", "watermill_offsets_` + old + `" TO ` + quoteIdentifier(role))
			f.awaitHorizon(t, old)
			drained := drain(t, openSQL(t, driver, f.urlAs(role)), watermillsql.DrainConfig{Topic: old, Envelopes: true, KeyMetadata: "order"})
			require.Equal(t, watermillsql.Drained{Moved: 60, Scheduled: int64(len(later))}, drained)
			f.requireStored(t, topic, now)
			f.requireDeferred(t, topic, later)
			for _, row := range f.deferred(t, topic) {
				require.Equal(t, "1", *row.Key)
			}
			require.Empty(t, f.stored(t, old))
		}
	}
}

// A big backlog is moved in parts, so that writers do not wait for all of it.
func testWatermillSQLDrainInParts(t *testing.T, f *fixture) {
	db := openSQL(t, "postgres", f.url)
	old := oldTable(t, db, "orders", "JSON")
	sent := jsonMessages(25)
	for i := 0; i < len(sent); i += 5 { // five in each transaction
		require.NoError(t, old.Publish("orders", sent[i:i+5]...))
	}
	f.awaitHorizon(t, "orders")
	config := watermillsql.DrainConfig{Topic: "orders", MaxRows: 12}
	require.Equal(t, watermillsql.Drained{Moved: 12, More: true}, drain(t, db, config))
	f.requireStored(t, "orders", sent[:12])
	require.Equal(t, watermillsql.Drained{Moved: 12, More: true}, drain(t, db, config))
	require.Equal(t, watermillsql.Drained{Moved: 1}, drain(t, db, config))
	require.Equal(t, watermillsql.Drained{}, drain(t, db, config))
	f.requireStored(t, "orders", sent)
}

// The id of a transaction comes with its first write, wherever that is. One that
// writes to the old table only after a drain has a row below what was written
// before: had the position gone past it, it would be lost to everybody. So what
// is above the oldest open transaction stays until that has ended.
func testWatermillSQLDrainWaitsForOlderTransactions(t *testing.T, f *fixture) {
	f.exec("CREATE TABLE accounts (id int)")
	db := openSQL(t, "pgx", f.url)
	old := oldTable(t, db, "orders", "JSON")
	sent := jsonMessages(3)
	require.NoError(t, old.Publish("orders", sent[0]))
	f.awaitHorizon(t, "orders")
	late := begin(t, db)
	_, err := late.ExecContext(t.Context(), "INSERT INTO accounts VALUES (1)")
	require.NoError(t, err)
	require.NoError(t, old.Publish("orders", sent[2]))

	config := watermillsql.DrainConfig{Topic: "orders"}
	require.Equal(t, watermillsql.Drained{Moved: 1, More: true}, drain(t, db, config))
	require.Equal(t, watermillsql.Drained{More: true}, drain(t, db, config))
	require.NoError(t, oldPublisher(t, late, "JSON").Publish("orders", sent[1]))
	require.NoError(t, late.Commit())
	f.awaitHorizon(t, "orders")
	require.Equal(t, watermillsql.Drained{Moved: 2}, drain(t, db, config))
	f.requireStored(t, "orders", sent)
}

// Publishers go on while the table is drained over and over: in the end each
// committed row is there once, those of a writer in their order, and none of
// what was rolled back. Every other drain is rolled back, too.
func testWatermillSQLDrainBesidePublishers(t *testing.T, f *fixture) {
	const writers, transactions = 4, 40
	f.exec("CREATE TABLE accounts (id int)")
	db := openSQL(t, "postgres", f.url)
	oldTable(t, db, "orders", "JSON")
	tick := make(chan struct{}) // a drain has ended
	var committed [writers][]string
	var running sync.WaitGroup
	for w := range writers {
		running.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(w)))
			for n := range transactions {
				tx, err := db.BeginTx(t.Context(), nil)
				if !assert.NoError(t, err) {
					return
				}
				if random.IntN(2) == 0 { // it has its id before a drain, and its row after
					_, err := tx.ExecContext(t.Context(), "INSERT INTO accounts VALUES ($1)", n)
					assert.NoError(t, err)
					select {
					case <-tick:
					case <-t.Context().Done():
					}
				}
				publisher, err := wsql.NewPublisher(tx, wsql.PublisherConfig{SchemaAdapter: oldSchema("JSON")}, nil)
				assert.NoError(t, err)
				var mine []string
				for i := range 1 + random.IntN(3) {
					mine = append(mine, fmt.Sprintf("%d/%04d/%d", w, n, i))
					assert.NoError(t, publisher.Publish("orders", message.NewMessage(mine[i], []byte("1"))))
				}
				if random.IntN(4) == 0 {
					assert.NoError(t, tx.Rollback())
					continue
				}
				if assert.NoError(t, tx.Commit()) {
					committed[w] = append(committed[w], mine...)
				}
			}
		})
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		running.Wait()
	}()

	config := watermillsql.DrainConfig{Topic: "orders"}
	drains := openSQL(t, "pgx", f.url)
	moved, runs := int64(0), 0
	for over := false; ; runs++ {
		select {
		case <-written:
			over = true
		default:
		}
		tx := begin(t, drains)
		drained, err := drainIn(t, tx, config)
		require.NoError(t, err)
		select {
		case tick <- struct{}{}:
		default:
		}
		if runs%2 == 0 && !over {
			require.NoError(t, tx.Rollback())
			continue
		}
		require.NoError(t, tx.Commit())
		moved += drained.Moved
		if over && !drained.More {
			break
		}
	}
	got := make([][]string, writers)
	for _, uuid := range f.storedUUIDs(t, "orders") {
		w, err := strconv.Atoi(uuid[:1])
		require.NoError(t, err)
		got[w] = append(got[w], uuid)
	}
	total := 0
	for w := range writers {
		require.Equal(t, committed[w], got[w])
		total += len(committed[w])
	}
	require.Equal(t, int64(total), moved)
	t.Logf("%d rows in %d drains", moved, runs+1)

	// They were read in the order in which watermill-sql would have.
	var order []string
	rows, err := f.pool.Query(t.Context(), `SELECT uuid FROM "watermill_orders" ORDER BY transaction_id, "offset"`)
	require.NoError(t, err)
	for rows.Next() {
		var uuid string
		require.NoError(t, rows.Scan(&uuid))
		order = append(order, uuid)
	}
	require.NoError(t, rows.Err())
	require.Equal(t, order, f.storedUUIDs(t, "orders"))
}

// A handler of watermill-sql has the offset's row while it publishes to the topic
// it consumes from. A drain that locked the messages first would wait for the one
// and make it wait for the other.
func testWatermillSQLDrainBesideAHandlerOfTheTopic(t *testing.T, f *fixture) {
	for _, driver := range oldDrivers {
		topic := "orders-" + driver
		db := openSQL(t, driver, f.url)
		sent := jsonMessages(3)
		require.NoError(t, oldTable(t, db, topic, "JSON").Publish(topic, sent[:2]...))
		subscriber := oldSubscriber(t, db, "JSON", 1, waitFor)
		messages, err := subscriber.Subscribe(t.Context(), topic)
		require.NoError(t, err)
		msg := await(t, messages)
		require.Equal(t, sent[0].UUID, msg.UUID)

		drained := make(chan watermillsql.Drained, 1)
		go func() {
			tx, err := db.BeginTx(t.Context(), nil)
			if !assert.NoError(t, err) {
				return
			}
			result, err := watermillsql.Drain(context.Background(), tx, watermillsql.DrainConfig{Schema: oddSchema, Topic: topic})
			assert.NoError(t, err)
			assert.NoError(t, tx.Commit())
			drained <- result
		}()
		require.Eventually(t, func() bool {
			return f.number("SELECT count(*)::int FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'LOCK TABLE %' AND datname = current_database()") == 1
		}, waitFor, 5*time.Millisecond, "the drain waits for the handler")
		tx, ok := wsql.TxFromContext(msg.Context())
		require.True(t, ok)
		require.NoError(t, oldPublisher(t, tx, "JSON").Publish(topic, sent[2]))
		require.True(t, msg.Ack())
		moved := await(t, drained).Moved
		f.awaitHorizon(t, topic)
		moved += drain(t, db, watermillsql.DrainConfig{Topic: topic}).Moved
		require.Equal(t, int64(2), moved)
		f.requireStored(t, topic, sent[1:])
		require.NoError(t, subscriber.Close())
	}
}

// What cannot be moved is named, before anything was.
func testWatermillSQLDrainRefuses(t *testing.T, f *fixture) {
	db := openSQL(t, "pgx", f.url)
	old := oldTable(t, db, "orders", "TEXT")
	require.NoError(t, old.Publish("orders", jsonMessages(2)...))
	config := watermillsql.DrainConfig{Topic: "orders"}
	untouched := func() {
		t.Helper()
		require.Zero(t, f.number("SELECT count(*)::int FROM outbox.messages"))
		require.Zero(t, f.number("SELECT count(*)::int FROM outbox.deferred"))
		require.Equal(t, "0/0", f.oldPosition(t, "orders"))
	}

	tx := begin(t, db)
	_, err := drainIn(t, tx, watermillsql.DrainConfig{Topic: "orders", ConsumerGroup: "typo"})
	require.ErrorIs(t, err, watermillsql.ErrUnknownGroup)
	_, err = tx.ExecContext(t.Context(), "SELECT 1")
	require.NoError(t, err, "the transaction is usable")
	require.NoError(t, tx.Rollback())

	tx, err = db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	require.NoError(t, err)
	_, err = drainIn(t, tx, config)
	require.ErrorIs(t, err, watermillsql.ErrIsolation)
	require.NoError(t, tx.Rollback())

	tx = begin(t, db)
	_, err = drainIn(t, tx, watermillsql.DrainConfig{Topic: "nothing"})
	require.ErrorContains(t, err, "watermill_offsets_nothing")
	require.NoError(t, tx.Rollback())
	untouched()

	for problem, test := range map[string]struct{ uuid, payload, metadata string }{
		"ordering key":           {"1", "1", `{"partition_key":"` + strings.Repeat("x", 1025) + `"}`},
		"no JSON object":         {"1", "1", `[]`},
		"a value that is no":     {"1", "1", `{"a":1}`},
		"is not in RFC 3339":     {"1", "1", `{"` + delay.DelayedUntilKey + `":"tomorrow"}`},
		"no destination_topic":   {"1", `{"uuid":"2"}`, `null`},
		"topic of more than":     {"1", `{"destination_topic":"` + strings.Repeat("x", 1025) + `"}`, `{}`},
		"uuid of more than 1024": {"1", `{"destination_topic":"a","uuid":"` + strings.Repeat("x", 1025) + `"}`, `{}`},
	} {
		f.execRaw(`TRUNCATE "watermill_orders"`)
		f.exec(`INSERT INTO "watermill_orders" ("offset", uuid, payload, metadata, transaction_id)
			VALUES (1, 'good', '{"destination_topic":"a"}', '{}', pg_current_xact_id()), (2, $1, $2, $3::text::json, pg_current_xact_id())`,
			test.uuid, test.payload, test.metadata)
		f.awaitHorizon(t, "orders")
		config := config
		config.Envelopes = strings.Contains(test.payload, "{")
		tx := begin(t, db)
		_, err := drainIn(t, tx, config)
		var bad *watermillsql.RowError
		require.ErrorAs(t, err, &bad, problem)
		require.Equal(t, int64(2), bad.Offset)
		require.Contains(t, bad.Problem, problem)
		require.Equal(t, `"watermill_orders"`, bad.Table)
		require.Less(t, len(err.Error()), 2000)
		require.NoError(t, tx.Commit())
		untouched()
	}

	f.execRaw(`ALTER TABLE "watermill_orders" DROP COLUMN payload; ALTER TABLE "watermill_orders" ADD COLUMN payload int`)
	tx = begin(t, db)
	_, err = drainIn(t, tx, config)
	require.ErrorIs(t, err, watermillsql.ErrPayloadType)
	require.NoError(t, tx.Rollback())
	untouched()
}
