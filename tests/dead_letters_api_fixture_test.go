package tests

import (
	"cmp"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// corpse is a dead letter to insert. What is left out has a value that does not
// matter.
type corpse struct {
	group, topic, key, uuid, metadata, err string
	payload                                []byte
	attempts                               int
}

// insertDeadLetter inserts a dead letter and returns its id. The message that it
// is of never was.
func (f *fixture) insertDeadLetter(c corpse) int64 {
	f.t.Helper()
	var id int64
	require.NoError(f.t, f.pool.QueryRow(f.t.Context(), f.sql(`
		INSERT INTO outbox.dead_letters
			(consumer_group, topic, key, uuid, metadata, payload, origin_era, origin_id, created_at, attempts, error)
		SELECT $1, $2, nullif($3, ''), $4, $5::text::json, $6, outbox.era(), 1 + coalesce(max(d.origin_id), 1000000), now(), $7, $8
		FROM outbox.dead_letters d RETURNING id`),
		cmp.Or(c.group, "group"), cmp.Or(c.topic, "topic"), c.key, cmp.Or(c.uuid, "uuid"), cmp.Or(c.metadata, "{}"),
		c.payload, cmp.Or(c.attempts, 5), cmp.Or(c.err, "failed")).Scan(&id))
	return id
}

// insertDeadLetters inserts n of them, in one statement: keys k0 to k9, uuids u1
// to un in the order of their ids.
func (f *fixture) insertDeadLetters(group, topic string, n, payloadBytes int) {
	f.t.Helper()
	f.exec(`INSERT INTO outbox.dead_letters
			(consumer_group, topic, key, uuid, payload, origin_era, origin_id, created_at, attempts, error)
		SELECT $1, $2, 'k' || g % 10, 'u' || g, convert_to(repeat('x', $4), 'UTF8'), outbox.era(), g + coalesce((SELECT max(d.origin_id) FROM outbox.dead_letters d), 1000000), now(), 5, 'failed'
		FROM generate_series(1, $3::int) g ORDER BY g`, group, topic, n, payloadBytes)
}

// deadLetters returns the API on a handle, the fixture's pool if it is nil.
func (f *fixture) deadLetters(db any) *outbox.DeadLetters {
	f.t.Helper()
	if db == nil {
		db = f.pool
	}
	letters, err := outbox.NewDeadLetters(db, outbox.DeadLettersConfig{Schema: oddSchema, Actor: "tester"})
	require.NoError(f.t, err)
	return letters
}

// allDeadLetters returns all that meet the filter, page by page.
func allDeadLetters(t testing.TB, letters *outbox.DeadLetters, filter outbox.DeadLetterFilter, limit int) []outbox.DeadLetter {
	t.Helper()
	all := []outbox.DeadLetter{}
	page := outbox.DeadLetterPage{Limit: limit}
	for {
		list, err := letters.List(t.Context(), filter, page)
		require.NoError(t, err)
		if len(list) == 0 {
			return all
		}
		all = append(all, list...)
		page.After = list[len(list)-1].ID
	}
}

func letterUUIDs(letters []outbox.DeadLetter) []string {
	list := []string{}
	for _, l := range letters {
		list = append(list, l.UUID)
	}
	return list
}

func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitFor)
	t.Cleanup(cancel)
	return ctx
}

// databaseNow is the time by the database's clock.
func (f *fixture) databaseNow() (now time.Time) {
	f.t.Helper()
	require.NoError(f.t, f.pool.QueryRow(f.t.Context(), "SELECT clock_timestamp()").Scan(&now))
	return now
}
