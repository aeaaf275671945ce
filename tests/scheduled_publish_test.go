package tests

import (
	"context"
	"database/sql"
	"encoding/json"
	"maps"
	"strconv"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

// scheduledSizes are sizes of a call that take different ways into the table
// unless something in it is scheduled.
var scheduledSizes = []int{1, 2, 5, 127, 128, 300}

// mixed returns n messages of every content, of which two in three have a delay,
// one that is past and one that is not.
func mixed(n int) (all, now, later []*message.Message) {
	all = variety(n)
	for i, msg := range all {
		msg.Metadata = maps.Clone(msg.Metadata)
		if msg.Metadata == nil && i%3 != 1 {
			msg.Metadata = message.Metadata{}
		}
		switch i % 3 {
		case 0:
			delay.Message(msg, delay.For(time.Hour+time.Duration(n-i)*time.Minute))
			later = append(later, msg)
		case 1:
			now = append(now, msg)
		case 2:
			delay.Message(msg, delay.For(-time.Hour))
			now = append(now, msg)
		}
	}
	return all, now, later
}

// requireDeferred fails unless these messages of the topic wait, in this order,
// with every byte as it was sent and due when they say.
func (f *fixture) requireDeferred(t testing.TB, topic string, want []*message.Message) {
	t.Helper()
	rows := f.deferred(t, topic)
	require.Len(t, rows, len(want))
	for i, row := range rows {
		require.Equal(t, want[i].UUID, row.UUID)
		require.Equal(t, want[i].Payload == nil, row.Payload == nil)
		require.Equal(t, []byte(want[i].Payload), row.Payload)
		var metadata message.Metadata
		require.NoError(t, json.Unmarshal(row.Metadata, &metadata))
		require.Equal(t, want[i].Metadata, metadata)
		require.WithinDuration(t, due(t, want[i]), row.Due, 0)
	}
}

// One call may have messages of both kinds; each goes where it belongs, through
// every handle, at every size, with no privilege beyond the publisher's.
func TestScheduledMixedCalls(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("publisher")
	f.grant(schema.Roles{Publisher: role})
	for kind, open := range poolKinds {
		publisher := publisherOn(t, open(t, f.urlAs(role)), outbox.PublisherConfig{})
		for _, n := range scheduledSizes {
			topic := kind + " " + strconv.Itoa(n)
			all, now, later := mixed(n)
			before := contents(all)
			require.NoError(t, publisher.Publish(topic, all...), topic)
			require.Equal(t, before, contents(all), topic)
			f.requireStored(t, topic, now)
			f.requireDeferred(t, topic, later)
		}
	}
}

// The way in which values are sent changes nothing, as a pooler or a setting may
// demand.
func TestScheduledInEveryQueryMode(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		topic := mode.String()
		config := f.pool.Config()
		config.ConnConfig.DefaultQueryExecMode = mode
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		all, now, later := mixed(20)
		require.NoError(t, publisherOn(t, pool, outbox.PublisherConfig{}).Publish(topic, all...), topic)
		f.requireStored(t, topic, now)
		f.requireDeferred(t, topic, later)

		// And the promoter.
		f.exec("UPDATE outbox.deferred SET due_at = now() - interval '1 year' WHERE topic = $1", topic)
		promoter, _ := f.promoter(pool, nil)
		f.promote(t, promoter)
		require.Empty(t, f.deferred(t, topic), topic)
		require.Len(t, f.stored(t, topic), 20, topic)
	}
}

// A scheduled message belongs to the transaction like any other.
func TestScheduledCommitsOrRollsBack(t *testing.T) {
	t.Parallel()

	type transaction struct {
		handle           any
		commit, rollback func() error
	}
	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{RequireTx: true})
	std := func(driver string) func(t *testing.T) transaction {
		db := openSQL(t, driver, f.url)
		return func(t *testing.T) transaction {
			tx, err := db.BeginTx(t.Context(), &sql.TxOptions{})
			require.NoError(t, err)
			return transaction{tx, tx.Commit, tx.Rollback}
		}
	}
	for kind, begin := range map[string]func(t *testing.T) transaction{
		"pgx": func(t *testing.T) transaction {
			tx, err := f.pool.Begin(t.Context())
			require.NoError(t, err)
			ctx := context.WithoutCancel(t.Context())
			return transaction{tx, func() error { return tx.Commit(ctx) }, func() error { return tx.Rollback(ctx) }}
		},
		"pgx stdlib": std("pgx"), "lib/pq": std("postgres"),
	} {
		for _, n := range scheduledSizes {
			topic := kind + " " + strconv.Itoa(n)
			all, now, later := mixed(n)

			tx := begin(t)
			require.NoError(t, publishIn(t.Context(), publisher, tx.handle, topic, all...))
			require.Empty(t, f.deferred(t, topic), "others see nothing before the commit")
			require.NoError(t, tx.rollback())
			require.Empty(t, f.stored(t, topic))
			require.Empty(t, f.deferred(t, topic))

			tx = begin(t)
			require.NoError(t, publishIn(t.Context(), publisher, tx.handle, topic, all...))
			require.NoError(t, tx.commit())
			f.requireStored(t, topic, now)
			f.requireDeferred(t, topic, later)
		}
	}
}

// A call without a transaction is all or nothing, whichever of the two tables
// refuses a message.
func TestScheduledCallIsAtomic(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for _, table := range []string{"messages", "deferred"} {
		f.exec("ALTER TABLE outbox." + table + " ADD CONSTRAINT refused CHECK (uuid <> 'refused')")
	}
	for kind, open := range poolKinds {
		publisher := publisherOn(t, open(t, f.url), outbox.PublisherConfig{})
		for _, n := range []int{3, 200} {
			for i := range 3 {
				all, _, _ := mixed(n)
				all[n-1-i].UUID = "refused"
				require.ErrorContains(t, publisher.Publish("orders", all...), "refused", kind)
				require.Empty(t, f.stored(t, "orders"), kind)
				require.Empty(t, f.deferred(t, "orders"), kind)
			}
		}
	}
}

// Through database/sql a call is bounded, and with pgx one with scheduled messages:
// they travel as arrays.
func TestScheduledCallTooLarge(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	pool, counter := f.countedPool(t)
	publisher := publisherOn(t, pool, outbox.PublisherConfig{MaxPayloadBytes: outbox.LimitPayloadBytes})
	before := counter.n.Load()
	payload := make([]byte, 130<<20)
	messages := []*message.Message{dueIn(time.Hour), message.NewMessage("2", payload), message.NewMessage("3", payload)}
	require.ErrorIs(t, publisher.Publish("orders", messages...), outbox.ErrCallTooLarge)
	require.Equal(t, before, counter.n.Load())
}

// An event bus has no other way to say it than its context, which it hands to
// the message. What the caller gave is not changed.
func TestScheduledByContext(t *testing.T) {
	t.Parallel()

	type orderExpired struct{ ID int }
	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	bus, err := cqrs.NewEventBusWithConfig(publisher, cqrs.EventBusConfig{
		GeneratePublishTopic: func(params cqrs.GenerateEventPublishTopicParams) (string, error) { return params.EventName, nil },
		Marshaler:            cqrs.JSONMarshaler{GenerateName: cqrs.StructName},
	})
	require.NoError(t, err)
	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	ctx := outbox.ContextWithTx(t.Context(), tx)
	until := time.Now().Add(24 * time.Hour).Truncate(time.Second)
	require.NoError(t, bus.Publish(delay.WithContext(ctx, delay.Until(until)), orderExpired{1}))
	require.NoError(t, bus.Publish(ctx, orderExpired{2}))
	require.NoError(t, bus.Publish(delay.WithContext(ctx, delay.For(-time.Minute)), orderExpired{3}))
	require.NoError(t, tx.Commit(t.Context()))

	rows := f.deferred(t, "orderExpired")
	require.Len(t, rows, 1)
	require.WithinDuration(t, until, rows[0].Due, 0)
	require.JSONEq(t, `{"ID":1}`, string(rows[0].Payload))
	require.Len(t, f.stored(t, "orderExpired"), 2)
	f.exec("UPDATE outbox.deferred SET due_at = now()")
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orderExpired")
	delivered := receive(t, messages, 3)
	require.Empty(t, delivered[0].Metadata.Get(delay.DelayedUntilKey))
	for _, msg := range delivered[1:] {
		require.NotEmpty(t, msg.Metadata.Get(delay.DelayedUntilKey))
		require.NotEmpty(t, msg.Metadata.Get(delay.DelayedForKey))
	}

	// A message without a map, and one whose own delay counts, in one call with
	// contexts that differ.
	bare, own, none := withMetadata("bare", nil, nil), withMetadata("own", nil, message.Metadata{}), withMetadata("none", nil, nil)
	delay.Message(own, delay.Until(until.Add(time.Hour)))
	bare.SetContext(delay.WithContext(t.Context(), delay.Until(until)))
	own.SetContext(bare.Context())
	none.SetContext(t.Context())
	before := contents([]*message.Message{bare, own, none})
	require.NoError(t, publisher.Publish("direct", bare, own, none))
	require.Equal(t, before, contents([]*message.Message{bare, own, none}))
	rows = f.deferred(t, "direct")
	require.Len(t, rows, 2)
	require.WithinDuration(t, until, rows[0].Due, 0)
	require.WithinDuration(t, until.Add(time.Hour), rows[1].Due, 0)
	require.Equal(t, []string{"none"}, f.storedUUIDs(t, "direct"))
}

// Every time that RFC 3339 can express is one for the database.
func TestScheduledTimes(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	urls := map[string]string{"default": f.url}
	for _, style := range []string{"German", "SQL", "Postgres"} {
		urls[style] = withParameter(t, f.url, "datestyle", style)
	}
	for style, address := range urls {
		for kind, open := range poolKinds {
			if kind == "lib/pq" && style != "default" {
				continue // it refuses any other style
			}
			publisher := publisherOn(t, open(t, address), outbox.PublisherConfig{})
			for until, want := range map[string]string{
				"2999-12-31T23:59:59.999999999-23:59": "3000-01-01 23:59:00+00",
				"9999-12-31T23:59:59Z":                "9999-12-31 23:59:59+00",
				"9999-12-31T23:59:59.999999999-23:59": "10000-01-01 23:59:00+00",
				"2999-03-04T05:06:07.000001+05:30":    "2999-03-03 23:36:07.000001+00",
				"0000-01-01T00:00:00Z":                "",
				"1969-12-31T23:59:59Z":                "",
				"2001-02-03T04:05:06Z":                "",
			} {
				topic := style + kind + until
				require.NoError(t, publisher.Publish(topic, withMetadata("1", nil, message.Metadata{delay.DelayedUntilKey: until})), topic)
				if want == "" {
					require.Len(t, f.stored(t, topic), 1, topic)
					continue
				}
				require.Equal(t, 1, f.number("SELECT count(*) FROM outbox.deferred WHERE topic = $1 AND due_at = $2::text::timestamptz", topic, want), topic)
			}
		}
	}
}

// A column, a cast or a clock without a zone, and delays end hours late or early
// wherever the session's zone or the process's is not UTC. Field case F87.
func TestScheduledInAnyZone(t *testing.T) {
	t.Parallel()

	for _, zone := range []string{"Asia/Bangkok", "America/New_York", "UTC"} {
		t.Run(zone, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			role := f.role("both")
			f.grant(schema.Roles{Publisher: role, Consumer: role})
			f.exec("ALTER ROLE " + quoteIdentifier(role) + " SET timezone = '" + zone + "'")
			pool := f.poolAs(role)
			var shown string
			require.NoError(t, pool.QueryRow(t.Context(), "SHOW timezone").Scan(&shown))
			require.Equal(t, zone, shown)
			_, messages := f.subscribe(f.consumerOn(pool.Config(), nil), outbox.SubscriberConfig{}, "here")
			location, err := time.LoadLocation(zone)
			require.NoError(t, err)
			for _, kind := range []string{"pgxpool", "pgx stdlib", "lib/pq"} {
				publisher := publisherOn(t, poolKinds[kind](t, f.urlAs(role)), outbox.PublisherConfig{})
				begin := time.Now()
				sent := dueAt(begin.Add(500 * time.Millisecond).In(location))
				require.NoError(t, publisher.Publish("here", sent))
				msg := nextMessage(t, messages)
				require.Equal(t, sent.UUID, msg.UUID)
				requireNeverEarly(t, msg)
				require.True(t, msg.Ack())
				require.Less(t, time.Since(begin), waitFor)
			}
			require.NoError(t, runChild(t, scheduledURL, f.urlAs(role), "TZ="+zone), "in a process whose own zone it is")
		})
	}
}
