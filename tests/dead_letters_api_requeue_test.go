package tests

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A tool that resets one of several columns leaves a message that nobody
// delivers, and another resets it behind the back of the limit. One call sends a
// dead letter back; its group gets it, as a first attempt, and no other group
// does; a second call finds nothing. Field case F61.
func TestDeadLettersRequeueReachesItsGroupOnly(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	letters := f.deadLetters(nil)
	consumer := f.consumer(nil)
	channels := map[string]<-chan *message.Message{}
	for _, group := range []string{"a", "b"} {
		_, channels[group] = f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: group}, "topic")
	}
	first := newMessages(1)
	require.NoError(t, publisher.Publish("topic", first...))
	requireNext(t, channels["a"], first...)
	requireNext(t, channels["b"], first...)

	payload := []byte("payload\x00")
	id := f.insertDeadLetter(corpse{
		group: "a", key: "key", uuid: "dead", payload: payload,
		metadata: `{"name":"value","reason_poisoned":"failed","topic_poisoned":"topic","handler_poisoned":"h","subscriber_poisoned":"s"}`,
	})
	require.NoError(t, letters.Requeue(t.Context(), id, ""))
	msg := nextMessage(t, channels["a"])
	require.Equal(t, "dead", msg.UUID)
	require.Equal(t, message.Payload(payload), msg.Payload)
	require.Equal(t, message.Metadata{"name": "value"}, msg.Metadata)
	delivery, ok := outbox.DeliveryFromCtx(msg.Context())
	require.True(t, ok)
	require.Equal(t, 1, delivery.Attempt)
	require.Equal(t, "key", delivery.OrderingKey)
	require.True(t, msg.Ack())
	require.ErrorIs(t, letters.Requeue(t.Context(), id, ""), outbox.ErrDeadLetterNotFound)
	require.ErrorIs(t, letters.Discard(t.Context(), id, ""), outbox.ErrDeadLetterNotFound)
	_, err := letters.Get(t.Context(), id)
	require.ErrorIs(t, err, outbox.ErrDeadLetterNotFound)

	last := newMessages(1)
	require.NoError(t, publisher.Publish("topic", last...))
	requireNext(t, channels["a"], last...)
	requireNext(t, channels["b"], last...)
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
}

// What was added at death is taken out of the metadata, and no other byte is
// touched: not the order, the blanks and the escapes, nor what cannot be decoded.
func TestDeadLettersRequeueLeavesOtherMetadataAlone(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	letters := f.deadLetters(nil)
	long := strings.Repeat(`long \" and \\ `, 80_000)
	for name, test := range map[string]struct{ stored, want string }{
		"empty":            {`{}`, `{}`},
		"blanks":           {" {\n} ", " {\n} "},
		"others":           {`{"b":"1", "a" : "2"}`, `{"b":"1", "a" : "2"}`},
		"all of them":      {`{"reason_poisoned":"r","topic_poisoned":"t","handler_poisoned":"h","subscriber_poisoned":"s"}`, `{}`},
		"first":            {`{"reason_poisoned":"r","b":"1","a":"2"}`, `{"b":"1","a":"2"}`},
		"middle":           {`{"b":"1","reason_poisoned":"r","a":"2"}`, `{"b":"1","a":"2"}`},
		"last":             {`{"b":"1","a":"2","reason_poisoned":"r"}`, `{"b":"1","a":"2"}`},
		"mixed, blanks":    {"{ \"topic_poisoned\" : \"t\" , \"b\" :\t\"1\", \"reason_poisoned\"\n: \"r\" }", "{ \"b\" :\t\"1\"}"},
		"escapes":          {`{"\u0041":"\u00e9\/","reason_poisoned":"\"r\"\\","z":"\\"}`, `{"\u0041":"\u00e9\/","z":"\\"}`},
		"cannot be text":   {`{"nul":"\u0000","reason_poisoned":"\ud800 \u0000","half":"\udead"}`, `{"nul":"\u0000","half":"\udead"}`},
		"twice":            {`{"reason_poisoned":"r","a":"1","a":"2","reason_poisoned":"r"}`, `{"a":"1","a":"2"}`},
		"long":             {`{"reason_poisoned":"` + long + `","a":"` + long + `"}`, `{"a":"` + long + `"}`},
		"in a value":       {`{"a":"\"reason_poisoned\":\"r\"","b":"\"reason_poisoned"}`, `{"a":"\"reason_poisoned\":\"r\"","b":"\"reason_poisoned"}`},
		"as a value":       {`{"a":"reason_poisoned","reason_poisoned":"r"}`, `{"a":"reason_poisoned"}`},
		"end of a key":     {`{"\"reason_poisoned":"1","my_reason_poisoned":"2","topic_poisoned":"t"}`, `{"\"reason_poisoned":"1","my_reason_poisoned":"2"}`},
		"commas in values": {`{"a":"x,","b":",}","topic_poisoned":",}"}`, `{"a":"x,","b":",}"}`},
		"array":            {`[1, 2]`, `[1, 2]`},
		"text":             {`"reason_poisoned"`, `"reason_poisoned"`},
		"null":             {`null`, `null`},
		"nested":           {`{"a":{"b":"1","reason_poisoned":"r"},"topic_poisoned":"t"}`, `{"a":{"b":"1","reason_poisoned":"r"},"topic_poisoned":"t"}`},
		"a number":         {`{"reason_poisoned":"r","n":1}`, `{"reason_poisoned":"r","n":1}`},
	} {
		t.Run(name, func(t *testing.T) {
			for _, table := range []string{"messages", "deferred"} {
				id := f.insertDeadLetter(corpse{topic: name, metadata: test.stored, payload: []byte("\x00\xff")})
				letter, err := letters.Get(t.Context(), id)
				require.NoError(t, err)
				require.Equal(t, test.stored, string(letter.RawMetadata))
				if table == "messages" {
					require.NoError(t, letters.Requeue(t.Context(), id, ""))
				} else {
					_, err := letters.RequeueAll(t.Context(), outbox.DeadLetterFilter{IDs: []int64{id}}, outbox.RequeueOptions{PerSecond: 1})
					require.NoError(t, err)
				}
				require.Equal(t, test.want, f.text("SELECT metadata::text FROM outbox."+table+" WHERE topic = $1", name))
				require.Equal(t, "00ff", f.text("SELECT encode(payload, 'hex') FROM outbox."+table+" WHERE topic = $1", name))
			}
		})
	}
}

// With standard_conforming_strings off, a backslash in a literal means something
// else: there is none.
func TestDeadLettersRequeueWithOldStrings(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec(`DO $do$ BEGIN
		EXECUTE format('ALTER DATABASE %I SET standard_conforming_strings = off', current_database());
	END $do$`)
	id := f.insertDeadLetter(corpse{metadata: `{"reason_poisoned":"\"r","a":"1"}`})
	require.NoError(t, f.deadLetters(f.connect(t)).Requeue(t.Context(), id, ""))
	require.Equal(t, `{"a":"1"}`, string(f.stored(t, "topic")[0].Metadata))
}

// A row that no handler can be given is looked at and sent back with its bytes
// intact.
func TestDeadLettersThatAreNoMessages(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	letters := f.deadLetters(nil)
	id := f.insertDeadLetter(corpse{uuid: "no map", metadata: `[1, "\u0000"]`, payload: []byte("payload")})
	letter, err := letters.Get(t.Context(), id)
	require.NoError(t, err)
	require.Nil(t, letter.Metadata)
	require.Equal(t, `[1, "\u0000"]`, string(letter.RawMetadata))
	_, err = letter.Message()
	require.ErrorContains(t, err, "object of strings")
	require.NoError(t, letters.Requeue(t.Context(), id, ""))
	row := f.stored(t, "topic")[0]
	require.Equal(t, `[1, "\u0000"]`, string(row.Metadata))
	require.Equal(t, "payload", string(row.Payload))
}

func TestDeadLettersMessage(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	letter, err := f.deadLetters(nil).Get(t.Context(), f.insertDeadLetter(corpse{uuid: "u", metadata: `{"a":"1"}`, payload: []byte("p")}))
	require.NoError(t, err)
	msg, err := letter.Message()
	require.NoError(t, err)
	require.True(t, msg.Equals(withMetadata("u", []byte("p"), message.Metadata{"a": "1"})))
	msg.Metadata.Set("a", "2")
	require.Equal(t, "1", letter.Metadata.Get("a"), "a map of its own")
}

// More than one statement's worth: all of them go back, in the order in which
// they died, and are delivered in it.
func TestDeadLettersRequeueAllKeepsTheOrder(t *testing.T) {
	t.Parallel()

	const total = 2500
	f := newFixture(t)
	f.insertDeadLetters("group", "topic", total, 10)
	f.insertDeadLetters("other", "topic", 10, 10)
	pool, counter := f.countedPool(t)
	letters := f.deadLetters(pool)
	before := counter.n.Load()
	n, err := letters.RequeueAll(t.Context(), outbox.DeadLetterFilter{ConsumerGroup: "group", Topic: "topic"}, outbox.RequeueOptions{})
	require.NoError(t, err)
	require.Equal(t, total, n)
	// The first question, three batches, one that finds nothing; each statement
	// is prepared, too.
	require.LessOrEqual(t, counter.n.Load()-before, int64(2*5))
	want := make([]string, total)
	for i := range want {
		want[i] = fmt.Sprintf("u%d", i+1)
	}
	require.Equal(t, want, f.storedUUIDs(t, "topic"))
	require.Equal(t, 10, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
	require.Equal(t, total, f.number("SELECT count(*)::int FROM outbox.dead_letter_log WHERE action = 'requeued'"))
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "group"}, "topic")
	require.Equal(t, want, uuids(receive(t, messages, total)))
}

// Long payloads are moved in statements of a bounded size.
func TestDeadLettersRequeueAllIsBoundedByBytes(t *testing.T) {
	t.Parallel()

	const total, mib = 12, 1 << 20
	f := newFixture(t)
	f.insertDeadLetters("group", "topic", total, 5*mib)
	f.insertDeadLetter(corpse{uuid: "long", payload: make([]byte, 17*mib)})
	n, err := f.deadLetters(nil).RequeueAll(t.Context(), outbox.DeadLetterFilter{All: true}, outbox.RequeueOptions{})
	require.NoError(t, err)
	require.Equal(t, total+1, n)
	require.Equal(t, 4, f.number(`SELECT max(n)::int FROM (SELECT count(*) AS n FROM outbox.messages GROUP BY xid) AS t`))
	require.Equal(t, 4, f.number(`SELECT count(DISTINCT xid)::int FROM outbox.messages`))
}

func TestDeadLettersRequeueLimit(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertDeadLetters("group", "topic", 1500, 10)
	letters := f.deadLetters(nil)
	for _, limit := range []int{1, 1200} {
		n, err := letters.RequeueAll(t.Context(), outbox.DeadLetterFilter{All: true}, outbox.RequeueOptions{Limit: limit})
		require.NoError(t, err)
		require.Equal(t, limit, n)
	}
	require.Equal(t, "u1202", f.text("SELECT uuid FROM outbox.dead_letters ORDER BY id LIMIT 1"))
	n, err := letters.DiscardAll(t.Context(), outbox.DeadLetterFilter{OrderingKey: "k0"}, "")
	require.NoError(t, err)
	require.Equal(t, 30, n)
	require.Equal(t, 1500-1201-30, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
	require.Equal(t, 30, f.number("SELECT count(*)::int FROM outbox.dead_letter_log WHERE action = 'discarded'"))
}

// A rate puts them into deferred, one due after the other by the database's
// clock, across statements.
func TestDeadLettersRequeueSlowly(t *testing.T) {
	t.Parallel()

	const total, perSecond = 1203, 40
	f := newFixture(t)
	f.insertDeadLetters("group", "topic", total, 10)
	before := f.databaseNow()
	n, err := f.deadLetters(nil).RequeueAll(t.Context(), outbox.DeadLetterFilter{All: true}, outbox.RequeueOptions{PerSecond: perSecond})
	require.NoError(t, err)
	require.Equal(t, total, n)
	after := f.databaseNow()
	require.Empty(t, f.stored(t, "topic"))
	rows, err := f.pool.Query(t.Context(), f.sql("SELECT uuid, key, target_group, attempt, due_at FROM outbox.deferred ORDER BY due_at, id"))
	require.NoError(t, err)
	type deferred struct {
		UUID, Key, Group string
		Attempt          int
		DueAt            time.Time
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[deferred])
	require.NoError(t, err)
	require.Len(t, list, total)
	require.WithinRange(t, list[0].DueAt, before, after)
	for i, row := range list {
		require.Equal(t, deferred{
			UUID: fmt.Sprintf("u%d", i+1), Key: fmt.Sprintf("k%d", (i+1)%10), Group: "group",
			DueAt: list[0].DueAt.Add(time.Duration(i) * time.Second / perSecond),
		}, row)
	}
}

// A message that dies again while its like are sent back is left alone, or the
// call would never end.
func TestDeadLettersThatDieAgainMeanwhile(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertDeadLetters("group", "topic", 1500, 10)
	f.exec(`CREATE FUNCTION die_again() RETURNS trigger LANGUAGE plpgsql AS $do$ BEGIN
		INSERT INTO outbox.dead_letters (consumer_group, topic, uuid, origin_era, origin_id, created_at, attempts, error)
			VALUES (old.consumer_group, old.topic, 'again', 1, old.id, now(), 5, 'failed');
		RETURN NULL;
	END $do$`)
	f.exec("CREATE TRIGGER die_again AFTER DELETE ON outbox.dead_letters FOR EACH ROW EXECUTE FUNCTION die_again()")
	n, err := f.deadLetters(nil).RequeueAll(bounded(t), outbox.DeadLetterFilter{All: true}, outbox.RequeueOptions{})
	require.NoError(t, err)
	require.Equal(t, 1500, n)
	require.Equal(t, 1500, f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE uuid = 'again'"))
}

// Several people press the button at the same moment: each dead letter goes back
// once, and nobody fails on the others.
func TestDeadLettersRequeuedByManyAtOnce(t *testing.T) {
	t.Parallel()

	const callers, total = 4, 3000
	f := newFixture(t)
	f.insertDeadLetters("group", "topic", total, 10)
	letters := f.deadLetters(nil)
	var sum atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			filter := outbox.DeadLetterFilter{All: true}
			if i%2 == 1 {
				filter = outbox.DeadLetterFilter{ConsumerGroup: "group", Topic: "topic"}
			}
			n, err := letters.RequeueAll(t.Context(), filter, outbox.RequeueOptions{})
			assert.NoError(t, err)
			sum.Add(int64(n))
		})
	}
	wg.Wait()
	require.Equal(t, int64(total), sum.Load())
	require.Len(t, f.stored(t, "topic"), total)
	require.Equal(t, total, f.number("SELECT count(DISTINCT uuid)::int FROM outbox.messages"))
	require.Equal(t, total, f.number("SELECT count(*)::int FROM outbox.dead_letter_log"))
}

// Where one step of it fails, nothing has happened: the dead letter is still
// there, and no message is.
func TestDeadLettersRequeueIsAllOrNothing(t *testing.T) {
	t.Parallel()

	for _, table := range []string{"messages", "dead_letter_log", "dead_letters"} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			id := f.insertDeadLetter(corpse{})
			f.exec("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $do$ BEGIN RAISE EXCEPTION 'refused'; END $do$")
			f.exec("CREATE TRIGGER refuse BEFORE INSERT OR DELETE ON outbox." + table + " FOR EACH ROW EXECUTE FUNCTION refuse()")
			letters := f.deadLetters(nil)
			require.ErrorContains(t, letters.Requeue(t.Context(), id, ""), "refused")
			n, err := letters.RequeueAll(t.Context(), outbox.DeadLetterFilter{All: true}, outbox.RequeueOptions{})
			require.ErrorContains(t, err, "refused")
			require.Zero(t, n)
			require.Empty(t, f.stored(t, "topic"))
			require.Zero(t, f.number("SELECT count(*)::int FROM outbox.dead_letter_log"))
			_, err = letters.Get(t.Context(), id)
			require.NoError(t, err)

			f.exec("DROP TRIGGER refuse ON outbox." + table)
			require.NoError(t, letters.Requeue(t.Context(), id, ""))
			require.Len(t, f.stored(t, "topic"), 1)
		})
	}
}

// After an error in the middle, the count is what has been sent back, and another
// call goes on with the rest. In a transaction nothing has been.
func TestDeadLettersRequeueAllThatFailsInTheMiddle(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertDeadLetters("group", "topic", 2500, 10)
	f.exec("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $do$ BEGIN RAISE EXCEPTION 'refused'; END $do$")
	f.exec("CREATE TRIGGER refuse BEFORE INSERT ON outbox.messages FOR EACH ROW WHEN (new.uuid = 'u1700') EXECUTE FUNCTION refuse()")
	all := outbox.DeadLetterFilter{All: true}

	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	n, err := f.deadLetters(tx).RequeueAll(t.Context(), all, outbox.RequeueOptions{})
	require.ErrorContains(t, err, "refused")
	require.Zero(t, n)
	_, err = f.deadLetters(tx).Count(t.Context(), all)
	require.ErrorContains(t, err, "can only be rolled back")
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, f.stored(t, "topic"))

	letters := f.deadLetters(nil)
	n, err = letters.RequeueAll(t.Context(), all, outbox.RequeueOptions{})
	require.ErrorContains(t, err, "refused")
	require.Equal(t, 1000, n)
	require.Len(t, f.stored(t, "topic"), n)
	f.exec("DROP TRIGGER refuse ON outbox.messages")
	n, err = letters.RequeueAll(t.Context(), all, outbox.RequeueOptions{})
	require.NoError(t, err)
	require.Equal(t, 1500, n)
	require.Equal(t, 2500, f.number("SELECT count(DISTINCT uuid)::int FROM outbox.messages"))
}

// With a transaction as handle everything is in it: nobody sees it before the
// commit, and a rollback undoes it.
func TestDeadLettersInATransaction(t *testing.T) {
	t.Parallel()

	for _, kind := range []string{"pgx.Tx", "sql.Tx"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			f.insertDeadLetters("group", "topic", 1500, 10)
			begin := func() (db any, commit, rollback func() error) {
				if kind == "sql.Tx" {
					tx, err := openSQL(t, "postgres", f.url).BeginTx(t.Context(), nil)
					require.NoError(t, err)
					return tx, tx.Commit, tx.Rollback
				}
				tx, err := f.pool.Begin(t.Context())
				require.NoError(t, err)
				return tx, func() error { return tx.Commit(t.Context()) }, func() error { return tx.Rollback(t.Context()) }
			}
			for _, commits := range []bool{false, true} {
				db, commit, rollback := begin()
				letters := f.deadLetters(db)
				n, err := letters.RequeueAll(t.Context(), outbox.DeadLetterFilter{All: true}, outbox.RequeueOptions{Limit: 1200})
				require.NoError(t, err)
				require.Equal(t, 1200, n)
				n, err = letters.DiscardAll(t.Context(), outbox.DeadLetterFilter{All: true}, "")
				require.NoError(t, err)
				require.Equal(t, 300, n)
				require.Empty(t, f.stored(t, "topic"))
				if !commits {
					require.NoError(t, rollback())
					require.Equal(t, 1500, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
					continue
				}
				require.NoError(t, commit())
				require.Len(t, f.stored(t, "topic"), 1200)
				require.Equal(t, 1500, f.number("SELECT count(*)::int FROM outbox.dead_letter_log"))
				_, err = letters.Count(t.Context(), outbox.DeadLetterFilter{})
				require.ErrorIs(t, err, outbox.ErrTxFinished)
			}
		})
	}
}

// A requeue waits for a transaction that has the dead letter, and goes by how it
// ends.
func TestDeadLettersRequeueWaitsForAnother(t *testing.T) {
	t.Parallel()

	for _, commits := range []bool{false, true} {
		t.Run(fmt.Sprintf("commits %t", commits), func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			id := f.insertDeadLetter(corpse{})
			tx, err := f.pool.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, f.deadLetters(tx).Discard(t.Context(), id, ""))
			result := make(chan error, 1)
			letters := f.deadLetters(nil)
			go func() { result <- letters.Requeue(bounded(t), id, "") }()
			require.Eventually(t, func() bool {
				return f.number(`SELECT count(*)::int FROM pg_stat_activity
					WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
			}, waitFor, time.Millisecond)
			if commits {
				require.NoError(t, tx.Commit(t.Context()))
				require.ErrorIs(t, await(t, result), outbox.ErrDeadLetterNotFound)
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
				require.NoError(t, await(t, result))
				require.Len(t, f.stored(t, "topic"), 1)
			}
		})
	}
}
