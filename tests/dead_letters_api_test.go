package tests

import (
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

// deadLetterHandles are the kinds of handles, by name.
var deadLetterHandles = map[string]func(t *testing.T, f *fixture) any{
	"pgxpool.Pool": func(_ *testing.T, f *fixture) any { return f.pool },
	"pgxpool.Pool with the simple protocol": func(t *testing.T, f *fixture) any {
		config := f.pool.Config()
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		return pool
	},
	"pgxpool.Conn": func(t *testing.T, f *fixture) any {
		conn, err := f.pool.Acquire(t.Context())
		require.NoError(t, err)
		t.Cleanup(conn.Release)
		return conn
	},
	"pgx.Conn":             func(t *testing.T, f *fixture) any { return f.connect(t) },
	"sql.DB with pgx":      func(t *testing.T, f *fixture) any { return openSQL(t, "pgx", f.url) },
	"sql.DB with lib/pq":   func(t *testing.T, f *fixture) any { return openSQL(t, "postgres", f.url) },
	"sql.Conn with lib/pq": func(t *testing.T, f *fixture) any { return sqlConn(t, openSQL(t, "postgres", f.url)) },
	"sql.Conn with pgx, simple": func(t *testing.T, f *fixture) any {
		return sqlConn(t, openSQL(t, "pgx", withParameter(t, f.url, "default_query_exec_mode", "simple_protocol")))
	},
}

func sqlConn(t *testing.T, db *sql.DB) *sql.Conn {
	t.Helper()
	conn, err := db.Conn(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn
}

// Each method, through each kind of handle: they bring values in different
// formats.
func TestDeadLettersThroughEachHandle(t *testing.T) {
	t.Parallel()

	for name, open := range deadLetterHandles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			before := f.databaseNow()
			ids := []int64{
				f.insertDeadLetter(corpse{
					group: "g", topic: "t", key: "key", uuid: "a", metadata: `{"name":"va\"lue"}`, payload: []byte("\x00\xff"),
					attempts: 7, err: "it failed",
				}),
				f.insertDeadLetter(corpse{group: "g", topic: "t", uuid: "b", payload: []byte{}}),
				f.insertDeadLetter(corpse{group: "g", topic: "t", uuid: "c"}),
				f.insertDeadLetter(corpse{group: "g", topic: "t", uuid: "d"}),
			}
			letters := f.deadLetters(open(t, f))
			ctx := bounded(t)

			list, err := letters.List(ctx, outbox.DeadLetterFilter{ConsumerGroup: "g", DiedFrom: before}, outbox.DeadLetterPage{})
			require.NoError(t, err)
			require.Equal(t, []string{"a", "b", "c", "d"}, letterUUIDs(list))
			first := list[0]
			require.WithinRange(t, first.DiedAt, before, f.databaseNow())
			require.WithinDuration(t, before, first.PublishedAt, time.Minute)
			require.Equal(t, outbox.DeadLetter{
				ID: ids[0], ConsumerGroup: "g", Topic: "t", OrderingKey: "key", UUID: "a",
				Metadata: message.Metadata{"name": `va"lue`}, RawMetadata: []byte(`{"name":"va\"lue"}`), Payload: []byte("\x00\xff"),
				Era: f.era(t), MessageID: first.MessageID, PublishedAt: first.PublishedAt, DiedAt: first.DiedAt,
				Attempts: 7, Error: "it failed",
			}, first)
			require.Positive(t, first.MessageID)
			require.Empty(t, list[1].OrderingKey)
			require.NotNil(t, list[1].Payload)
			require.Empty(t, list[1].Payload)
			require.Nil(t, list[2].Payload)
			n, err := letters.Count(ctx, outbox.DeadLetterFilter{IDs: ids[1:]})
			require.NoError(t, err)
			require.Equal(t, 3, n)
			got, err := letters.Get(ctx, ids[0])
			require.NoError(t, err)
			require.Equal(t, first, got)

			require.NoError(t, letters.Requeue(ctx, ids[0], "repaired"))
			require.NoError(t, letters.Discard(ctx, ids[1], "no use"))
			n, err = letters.RequeueAll(ctx, outbox.DeadLetterFilter{IDs: ids[:3]}, outbox.RequeueOptions{})
			require.NoError(t, err)
			require.Equal(t, 1, n)
			n, err = letters.RequeueAll(ctx, outbox.DeadLetterFilter{All: true}, outbox.RequeueOptions{PerSecond: 0.5})
			require.NoError(t, err)
			require.Equal(t, 1, n)
			require.Equal(t, []string{"a", "c"}, f.storedUUIDs(t, "t"))
			require.Equal(t, "d", f.text("SELECT uuid FROM outbox.deferred"))

			// The subscription is what makes the group, for Bury.
			subscriber, _ := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "g"}, "t")
			require.NoError(t, subscriber.Close())
			message := f.stored(t, "t")[0]
			require.NoError(t, letters.Bury(ctx, "g", "t", f.era(t), message.ID, "it blocks"))

			events, err := letters.Log(ctx, outbox.DeadLetterEventFilter{}, outbox.DeadLetterPage{})
			require.NoError(t, err)
			var story []string
			for _, e := range events {
				require.Equal(t, "tester", e.Actor)
				require.Equal(t, "g", e.ConsumerGroup)
				require.WithinRange(t, e.At, before, f.databaseNow())
				story = append(story, fmt.Sprintf("%s %s %s", e.UUID, e.Action, e.Reason))
			}
			require.Equal(t, []string{"a requeued repaired", "b discarded no use", "c requeued ", "d requeued ", "a died it blocks"}, story)
			require.Equal(t, outbox.DeadLetterEvent{
				ID: events[0].ID, At: events[0].At, Action: outbox.DeadLetterRequeued, Actor: "tester", Reason: "repaired",
				DeadLetterID: ids[0], ConsumerGroup: "g", Topic: "t", OrderingKey: "key", UUID: "a",
				Era: first.Era, MessageID: first.MessageID, Attempts: 7,
			}, events[0])
		})
	}
}

// Whoever is at work is in the audit trail: by a given name, or by the role's.
func TestDeadLettersActor(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	letters, err := outbox.NewDeadLetters(f.poolAs(role), outbox.DeadLettersConfig{Schema: oddSchema})
	require.NoError(t, err)
	require.NoError(t, letters.Discard(t.Context(), f.insertDeadLetter(corpse{}), ""))
	events, err := letters.Log(t.Context(), outbox.DeadLetterEventFilter{}, outbox.DeadLetterPage{})
	require.NoError(t, err)
	require.Len(t, events, 1)
	require.Equal(t, role, events[0].Actor)
}

// What a consumer may do is enough for each method; a publisher may do none of
// it, and is told what to do.
func TestDeadLettersPrivileges(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer, publisher := f.role("consumer"), f.role("publisher")
	f.grant(schema.Roles{Consumer: consumer, Publisher: publisher})
	subscriber, _ := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "group"}, "topic")
	require.NoError(t, subscriber.Close())
	f.insertRows("topic", [2]string{"blocks", "{}"})
	blocks := f.stored(t, "topic")[0].ID
	f.insertDeadLetters("group", "topic", 4, 1)
	filter := outbox.DeadLetterFilter{ConsumerGroup: "group"}
	calls := map[string]func(letters *outbox.DeadLetters) error{
		"List": func(l *outbox.DeadLetters) error {
			_, err := l.List(t.Context(), filter, outbox.DeadLetterPage{})
			return err
		},
		"Count": func(l *outbox.DeadLetters) error { _, err := l.Count(t.Context(), filter); return err },
		"Requeue": func(l *outbox.DeadLetters) error {
			return l.Requeue(t.Context(), int64(f.number("SELECT min(id)::int FROM outbox.dead_letters")), "")
		},
		"Discard": func(l *outbox.DeadLetters) error {
			return l.Discard(t.Context(), int64(f.number("SELECT min(id)::int FROM outbox.dead_letters")), "")
		},
		"RequeueAll": func(l *outbox.DeadLetters) error {
			_, err := l.RequeueAll(t.Context(), filter, outbox.RequeueOptions{Limit: 1})
			return err
		},
		"RequeueAll slowly": func(l *outbox.DeadLetters) error {
			_, err := l.RequeueAll(t.Context(), filter, outbox.RequeueOptions{Limit: 1, PerSecond: 1})
			return err
		},
		"Bury": func(l *outbox.DeadLetters) error { return l.Bury(t.Context(), "group", "topic", f.era(t), blocks, "") },
		"Log": func(l *outbox.DeadLetters) error {
			_, err := l.Log(t.Context(), outbox.DeadLetterEventFilter{}, outbox.DeadLetterPage{})
			return err
		},
	}
	mayNot, may := f.deadLetters(f.poolAs(publisher)), f.deadLetters(f.poolAs(consumer))
	for name, call := range calls {
		err := call(mayNot)
		require.ErrorContains(t, err, "schema.Grants", name)
		require.ErrorContains(t, err, "permission denied", name)
		require.NoError(t, call(may), name)
	}
}

func TestDeadLettersConstructor(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for name, test := range map[string]struct {
		db     any
		config outbox.DeadLettersConfig
		is     error
		says   string
	}{
		"nil":              {nil, outbox.DeadLettersConfig{Schema: oddSchema}, outbox.ErrUnsupportedExecutor, "nil"},
		"no handle":        {"handle", outbox.DeadLettersConfig{Schema: oddSchema}, outbox.ErrUnsupportedExecutor, "string"},
		"not installed":    {f.pool, outbox.DeadLettersConfig{Schema: "elsewhere"}, outbox.ErrNotInstalled, "elsewhere"},
		"no schema's name": {f.pool, outbox.DeadLettersConfig{Schema: strings.Repeat("x", 64)}, nil, "DeadLettersConfig.Schema"},
		"actor with a NUL": {f.pool, outbox.DeadLettersConfig{Schema: oddSchema, Actor: "a\x00"}, nil, "DeadLettersConfig.Actor"},
		"long actor":       {f.pool, outbox.DeadLettersConfig{Schema: oddSchema, Actor: strings.Repeat("a", outbox.MaxActorBytes+1)}, nil, "DeadLettersConfig.Actor"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := outbox.NewDeadLetters(test.db, test.config)
			require.ErrorContains(t, err, test.says)
			if test.is != nil {
				require.ErrorIs(t, err, test.is)
			}
		})
	}
}

// A bad argument is refused by name before anything is sent to the server.
func TestDeadLettersRefuseBadInput(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertDeadLetters("group", "topic", 3, 1)
	pool, counter := f.countedPool(t)
	letters := f.deadLetters(pool)
	ctx := t.Context()
	list := func(filter outbox.DeadLetterFilter, page outbox.DeadLetterPage) error {
		_, err := letters.List(ctx, filter, page)
		return err
	}
	requeue := func(filter outbox.DeadLetterFilter, options outbox.RequeueOptions) error {
		_, err := letters.RequeueAll(ctx, filter, options)
		return err
	}
	discard := func(filter outbox.DeadLetterFilter, reason string) error {
		_, err := letters.DiscardAll(ctx, filter, reason)
		return err
	}
	log := func(filter outbox.DeadLetterEventFilter, page outbox.DeadLetterPage) error {
		_, err := letters.Log(ctx, filter, page)
		return err
	}
	all, long, now := outbox.DeadLetterFilter{All: true}, strings.Repeat("x", outbox.MaxReasonBytes+1), time.Now()
	zero := 0.0
	before := counter.n.Load()
	for _, test := range []struct {
		says string
		err  error
	}{
		{"DeadLetterPage.Limit", list(all, outbox.DeadLetterPage{Limit: -1})},
		{"DeadLetterPage.Limit", list(all, outbox.DeadLetterPage{Limit: outbox.LimitDeadLetterPage + 1})},
		{"DeadLetterPage.After", list(all, outbox.DeadLetterPage{After: -1})},
		{"DeadLetterFilter.ConsumerGroup", list(outbox.DeadLetterFilter{ConsumerGroup: "\xff"}, outbox.DeadLetterPage{})},
		{"DeadLetterFilter.Topic", list(outbox.DeadLetterFilter{Topic: "a\x00"}, outbox.DeadLetterPage{})},
		{"DeadLetterFilter.OrderingKey", list(outbox.DeadLetterFilter{OrderingKey: long}, outbox.DeadLetterPage{})},
		{"DeadLetterFilter.UUID", list(outbox.DeadLetterFilter{UUID: "\x00"}, outbox.DeadLetterPage{})},
		{"DeadLetterFilter.ErrorContains", list(outbox.DeadLetterFilter{ErrorContains: "\xff"}, outbox.DeadLetterPage{})},
		{"DeadLetterFilter.DiedFrom", list(outbox.DeadLetterFilter{DiedFrom: now, DiedBefore: now}, outbox.DeadLetterPage{})},
		{"DeadLetterFilter.All", requeue(outbox.DeadLetterFilter{}, outbox.RequeueOptions{})},
		{"DeadLetterFilter.All", requeue(outbox.DeadLetterFilter{All: true, Topic: "topic"}, outbox.RequeueOptions{})},
		{"DeadLetterFilter.All", discard(outbox.DeadLetterFilter{}, "")},
		{"reason", discard(all, long)},
		{"reason", letters.Requeue(ctx, 1, "\xff")},
		{"reason", letters.Discard(ctx, 1, long)},
		{"RequeueOptions.Reason", requeue(all, outbox.RequeueOptions{Reason: "\x00"})},
		{"RequeueOptions.Limit", requeue(all, outbox.RequeueOptions{Limit: -1})},
		{"RequeueOptions.PerSecond", requeue(all, outbox.RequeueOptions{PerSecond: -1})},
		{"RequeueOptions.PerSecond", requeue(all, outbox.RequeueOptions{PerSecond: zero / zero})},
		{"RequeueOptions.PerSecond", requeue(all, outbox.RequeueOptions{PerSecond: 1 / zero})},
		{"RequeueOptions.PerSecond", requeue(all, outbox.RequeueOptions{PerSecond: 1e-300})},
		{"DeadLetterEventFilter.Action", log(outbox.DeadLetterEventFilter{Action: "eaten"}, outbox.DeadLetterPage{})},
		{"DeadLetterEventFilter.Topic", log(outbox.DeadLetterEventFilter{Topic: "\xff"}, outbox.DeadLetterPage{})},
		{"DeadLetterEventFilter.DeadLetterID", log(outbox.DeadLetterEventFilter{DeadLetterID: -1}, outbox.DeadLetterPage{})},
		{"DeadLetterEventFilter.From", log(outbox.DeadLetterEventFilter{From: now, Before: now}, outbox.DeadLetterPage{})},
		{"DeadLetterPage.Limit", log(outbox.DeadLetterEventFilter{}, outbox.DeadLetterPage{Limit: -1})},
		{"topic", letters.Bury(ctx, "group", "", 1, 1, "")},
		{"group", letters.Bury(ctx, "", "topic", 1, 1, "")},
		{"group", letters.Bury(ctx, "\xff", "topic", 1, 1, "")},
		{"reason", letters.Bury(ctx, "group", "topic", 1, 1, long)},
	} {
		require.ErrorContains(t, test.err, test.says)
	}
	require.Equal(t, before, counter.n.Load(), "something was sent to the server")
	require.Equal(t, 3, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
}

// Each condition alone, and all together.
func TestDeadLettersFilter(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	letters := f.deadLetters(nil)
	start := f.databaseNow()
	ids := map[string]int64{}
	for _, c := range []corpse{
		{uuid: "a", group: "g1", topic: "t1", key: "k1", err: "no 100% of it"},
		{uuid: "b", group: "g1", topic: "t2", key: "k2", err: "no 100 of it"},
		{uuid: "c", group: "g2", topic: "t1", err: "NO 100% of it"},
		{uuid: "d", group: "g2", topic: "t2", key: "k1", err: `\ _ '`},
	} {
		ids[c.uuid] = f.insertDeadLetter(c)
	}
	middle := f.databaseNow()
	f.exec("UPDATE outbox.dead_letters SET died_at = $1 WHERE uuid IN ('c', 'd')", middle)
	type filter = outbox.DeadLetterFilter
	for name, test := range map[string]struct {
		filter filter
		want   []string
	}{
		"none":            {filter{}, []string{"a", "b", "c", "d"}},
		"all":             {filter{All: true}, []string{"a", "b", "c", "d"}},
		"ids":             {filter{IDs: []int64{ids["d"], ids["a"], -1, 1 << 60}}, []string{"a", "d"}},
		"no ids":          {filter{IDs: []int64{}}, []string{}},
		"group":           {filter{ConsumerGroup: "g1"}, []string{"a", "b"}},
		"topic":           {filter{Topic: "t1"}, []string{"a", "c"}},
		"group and topic": {filter{ConsumerGroup: "g2", Topic: "t1"}, []string{"c"}},
		"key":             {filter{OrderingKey: "k1"}, []string{"a", "d"}},
		"uuid":            {filter{UUID: "b"}, []string{"b"}},
		"error":           {filter{ErrorContains: "100%"}, []string{"a", "c"}},
		"error's case":    {filter{ErrorContains: "no 100%"}, []string{"a"}},
		"odd error":       {filter{ErrorContains: `\ _ '`}, []string{"d"}},
		"from":            {filter{DiedFrom: middle}, []string{"c", "d"}},
		"before":          {filter{DiedBefore: middle}, []string{"a", "b"}},
		"between":         {filter{DiedFrom: start, DiedBefore: middle}, []string{"a", "b"}},
		"everything": {filter{
			IDs: []int64{ids["d"], ids["c"]}, ConsumerGroup: "g2", Topic: "t2", OrderingKey: "k1", UUID: "d", ErrorContains: "_",
			DiedFrom: middle, DiedBefore: middle.Add(time.Second),
		}, []string{"d"}},
		"nothing": {filter{ConsumerGroup: "g1", Topic: "t3"}, []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, limit := range []int{0, 1, 3} {
				require.Equal(t, test.want, letterUUIDs(allDeadLetters(t, letters, test.filter, limit)))
			}
			n, err := letters.Count(t.Context(), test.filter)
			require.NoError(t, err)
			require.Equal(t, len(test.want), n)
		})
	}
}

// A page of long payloads ends before memory does, and is never empty before the
// end.
func TestDeadLettersPageIsBoundedByBytes(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	const mib = 1 << 20
	f.insertDeadLetters("group", "topic", 10, 3*mib)
	f.insertDeadLetter(corpse{uuid: "long", payload: make([]byte, 9*mib)})
	f.insertDeadLetter(corpse{uuid: "last"})
	letters := f.deadLetters(nil)
	list, err := letters.List(t.Context(), outbox.DeadLetterFilter{}, outbox.DeadLetterPage{})
	require.NoError(t, err)
	require.Len(t, list, 3)
	all := allDeadLetters(t, letters, outbox.DeadLetterFilter{}, 0)
	require.Equal(t, []string{"u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8", "u9", "u10", "long", "last"}, letterUUIDs(all))
}

// The audit trail, by each of its conditions.
func TestDeadLettersLog(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	letters := f.deadLetters(nil)
	ids := map[string]int64{}
	for _, c := range []corpse{{uuid: "a", group: "g1", topic: "t1"}, {uuid: "b", group: "g2", topic: "t2"}, {uuid: "c", group: "g2", topic: "t1"}} {
		ids[c.uuid] = f.insertDeadLetter(c)
	}
	start := f.databaseNow()
	require.NoError(t, letters.Requeue(t.Context(), ids["a"], ""))
	middle := f.databaseNow()
	require.NoError(t, letters.Discard(t.Context(), ids["b"], ""))
	require.NoError(t, letters.Discard(t.Context(), ids["c"], ""))
	type filter = outbox.DeadLetterEventFilter
	for name, test := range map[string]struct {
		filter filter
		want   []string
	}{
		"none":   {filter{}, []string{"a", "b", "c"}},
		"letter": {filter{DeadLetterID: ids["b"]}, []string{"b"}},
		"group":  {filter{ConsumerGroup: "g2"}, []string{"b", "c"}},
		"topic":  {filter{Topic: "t1"}, []string{"a", "c"}},
		"uuid":   {filter{UUID: "a"}, []string{"a"}},
		"action": {filter{Action: outbox.DeadLetterDiscarded}, []string{"b", "c"}},
		"from":   {filter{From: middle}, []string{"b", "c"}},
		"before": {filter{From: start, Before: middle}, []string{"a"}},
	} {
		t.Run(name, func(t *testing.T) {
			page := outbox.DeadLetterPage{Limit: 1}
			got := []string{}
			for {
				events, err := letters.Log(t.Context(), test.filter, page)
				require.NoError(t, err)
				if len(events) == 0 {
					break
				}
				require.Len(t, events, 1)
				got = append(got, events[0].UUID)
				page.After = events[0].ID
			}
			require.Equal(t, test.want, got)
		})
	}
}
