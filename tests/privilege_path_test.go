package tests

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// A library that asks for more than it needs cannot run as the roles of
// production, and one whose grants are too narrow fails on the path that nobody
// tried. Everything is done here by the role whose part it is, on a server where
// nobody but an onlooker is a superuser. Field case F103.
func TestLeastPrivilege(t *testing.T) {
	t.Parallel()

	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeWAL} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()

			m := newManaged(t)
			for _, role := range []string{m.roles.Publisher, m.roles.Consumer, m.roles.Upkeep} {
				require.Empty(t, m.check(m.poolAs(role)), role)
			}
			require.Equal(t, []string{"live role " + quoteIdentifier(m.roles.Owner)}, kinds(m.check(m.poolAs(m.roles.Owner))), "it cannot read the WAL")
			m.wholePath(t, mode)
		})
	}
}

// wholePath publishes in every way, and does to the messages all that can be done.
func (m *managed) wholePath(t *testing.T, mode outbox.Mode) {
	t.Helper()
	consumer := m.consumerAs(func(c *outbox.ConsumerConfig) { c.Mode = mode })
	subscriber, messages := m.subscribe(consumer, outbox.SubscriberConfig{Ordering: outbox.OrderingByKey}, "topic")
	if mode == outbox.ModeWAL {
		awaitLive(t, consumer)
	}
	for kind, open := range poolKinds {
		publisher := publisherOn(t, open(t, m.urlAs(m.roles.Publisher)), outbox.PublisherConfig{})
		sent := keyed(5)
		require.NoError(t, publisher.Publish("topic", sent...), kind)
		require.ElementsMatch(t, uuids(sent), uuids(receive(t, messages, len(sent))), kind)
		soon := dueIn(50 * time.Millisecond)
		require.NoError(t, publisher.Publish("topic", soon), kind)
		requireNext(t, messages, soon)
	}
	publisherPool := m.poolAs(m.roles.Publisher)
	publisher := publisherOn(t, publisherPool, outbox.PublisherConfig{})
	for _, call := range []string{"publish('topic', 'x')", "publish('topic', 'x', deliver_at => pg_catalog.clock_timestamp() + interval '50 ms')"} {
		var uuid string
		require.NoError(t, publisherPool.QueryRow(t.Context(), m.sql("SELECT outbox."+call)).Scan(&uuid), call)
		require.Equal(t, uuid, receive(t, messages, 1)[0].UUID, call)
	}

	// More shards, while it runs.
	require.NoError(t, consumer.Reshard(t.Context(), "", "topic", 3))
	sent := keyed(9)
	require.NoError(t, publisher.Publish("topic", sent...))
	require.ElementsMatch(t, uuids(sent), uuids(receive(t, messages, len(sent))))
	require.Eventually(t, func() bool {
		return m.number("SELECT count(*) FROM outbox.cursors WHERE topic = 'topic' AND shards = 3") == 3
	}, waitFor, 5*time.Millisecond)
	require.NoError(t, subscriber.Close())

	// Tried again at once and later, given up, and sent back.
	retry := quick(3)
	retry.Mode = outbox.RetryDeferred
	for name, retry := range map[string]outbox.RetryConfig{"in place": quick(3), "deferred": retry} {
		_, messages := m.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: name, Retry: retry}, name)
		bad := newMessages(1)
		require.NoError(t, publisher.Publish(name, bad...))
		for range 3 {
			require.True(t, nextMessage(t, messages).Nack(), name)
		}
		require.Eventually(t, func() bool { return len(m.deadUUIDs(t, name)) == 1 }, waitFor, 5*time.Millisecond, name)
		// They are for people and programs of the operator's, in a session whose
		// search_path is what it should be.
		sane := pgtest.Pool(t, withParameter(t, m.urlAs(m.roles.Consumer), "search_path", "pg_catalog"))
		letters, err := outbox.NewDeadLetters(sane, outbox.DeadLettersConfig{Schema: oddSchema})
		require.NoError(t, err)
		filter := outbox.DeadLetterFilter{ConsumerGroup: name}
		list, err := letters.List(t.Context(), filter, outbox.DeadLetterPage{})
		require.NoError(t, err)
		require.Equal(t, uuids(bad), letterUUIDs(list))
		require.NoError(t, letters.Requeue(t.Context(), list[0].ID, "tried"))
		msg := nextMessage(t, messages)
		require.Equal(t, bad[0].UUID, msg.UUID)
		d, _ := outbox.DeliveryFromCtx(msg.Context())
		require.NoError(t, letters.Bury(t.Context(), name, name, d.Era, d.ID, "enough"))
		require.True(t, msg.Ack())
		list, err = letters.List(t.Context(), filter, outbox.DeadLetterPage{})
		require.NoError(t, err)
		require.NoError(t, letters.Discard(t.Context(), list[0].ID, "done"))
	}

	// On to a broker, from many topics by one cursor.
	out := newPickyPublisher("")
	_, stop := runForwarder(t, forwarder.Config{
		Source:       forwarder.FromOutbox(consumer, outbox.SubscriberConfig{ConsumerGroup: "forward", StartFrom: outbox.StartLatest}, outbox.AllTopics()),
		Destinations: []forwarder.Destination{{Publisher: out}},
	}, nil)
	forwarded := []*message.Message{newMessages(1)[0], newMessages(1)[0]}
	require.NoError(t, publisher.Publish("one", forwarded[0]))
	require.NoError(t, publisher.Publish("two", forwarded[1]))
	require.ElementsMatch(t, uuids(forwarded), []string{receiveOne(t, out.taken), receiveOne(t, out.taken)})
	stop()
	require.NoError(t, consumer.Close())
}

// What each role may not do. A consumer's may not write the log but for retries of
// its group's, nor keep the audit trail tidy; upkeep may not move a position.
func TestLeastPrivilegeEndsThere(t *testing.T) {
	t.Parallel()

	m := newManaged(t)
	for role, refused := range map[string][]string{
		m.roles.Publisher: {
			"SELECT payload FROM outbox.messages", "SELECT payload FROM outbox.deferred", "SELECT payload FROM outbox.dead_letters",
			"SELECT FROM outbox.dead_letter_log", "SELECT FROM outbox.cursors", "SELECT FROM outbox.inbox", "SELECT FROM outbox.processes",
			"INSERT INTO outbox.messages (topic, uuid, xid) VALUES ('t', 'u', '3')", "INSERT INTO outbox.messages (topic, uuid, era) VALUES ('t', 'u', 1)",
			"INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('t', 'u', now())", "INSERT INTO outbox.messages (topic, uuid, target_group) VALUES ('t', 'u', 'g')",
			"INSERT INTO outbox.deferred (due_at, topic, uuid, target_group) VALUES (now(), 't', 'u', 'g')",
			"INSERT INTO outbox.deferred (due_at, topic, uuid, origin_id) VALUES (now(), 't', 'u', 1)",
			"UPDATE outbox.cursors SET floor = 0", "DELETE FROM outbox.cursors", "INSERT INTO outbox.boot DEFAULT VALUES",
			"DELETE FROM outbox.deferred", "UPDATE outbox.deferred SET due_at = now()", "SELECT outbox.shard('k', 1, 2)",
			"CREATE TABLE outbox.mine ()", "CREATE TABLE public.mine ()", "CREATE SCHEMA mine", "ALTER PUBLICATION " + quoteIdentifier(oddSchema) + " SET (publish = '')",
		},
		m.roles.Consumer: {
			"INSERT INTO outbox.messages (topic, uuid, xid) VALUES ('t', 'u', '3')", "INSERT INTO outbox.messages (topic, uuid, era) VALUES ('t', 'u', 1)",
			"INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('t', 'u', now())",
			"UPDATE outbox.messages SET payload = NULL", "DELETE FROM outbox.messages", "TRUNCATE outbox.messages", "TRUNCATE outbox.messages_default",
			"UPDATE outbox.dead_letter_log SET reason = ''", "DELETE FROM outbox.dead_letter_log", "UPDATE outbox.meta SET value = '1'", "TRUNCATE outbox.cursors",
			"SELECT outbox.publish('t', 'x')", "CREATE TABLE outbox.mine ()", "DROP TABLE outbox.messages_default",
			"ALTER PUBLICATION " + quoteIdentifier(oddSchema) + " SET (publish = '')", "DROP PUBLICATION " + quoteIdentifier(oddSchema),
		},
		m.roles.Upkeep: {
			"UPDATE outbox.messages SET payload = NULL", "INSERT INTO outbox.messages (topic, uuid, xid) VALUES ('t', 'u', '3')",
			"UPDATE outbox.cursors SET floor = 0", "DELETE FROM outbox.cursors", "DELETE FROM outbox.dead_letters", "DELETE FROM outbox.dead_letter_log",
			"UPDATE outbox.boot SET life = gen_random_uuid()", "DROP PUBLICATION " + quoteIdentifier(oddSchema),
		},
		m.roles.Owner: {"SELECT pg_catalog.pg_switch_wal()", "CREATE PUBLICATION mine FOR ALL TABLES", "CREATE ROLE mine"},
	} {
		pool := m.poolAs(role)
		for _, text := range refused {
			m.requireDenied(pool, text)
		}
	}
}

// hostileObjects shadow what statements are made of. Each says so when it is used.
const hostileObjects = `
CREATE SCHEMA hostile;
GRANT USAGE ON SCHEMA hostile TO PUBLIC;
CREATE FUNCTION hostile.caught() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'a hostile object was used'; END $$;
DO $do$
DECLARE
    f record;
    o record;
BEGIN
    FOR f IN
        SELECT p.proname, pg_get_function_identity_arguments(p.oid) AS arguments, format_type(p.prorettype, NULL) AS returns
        FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND NOT p.proretset AND p.provariadic = 0
            AND pg_get_function_identity_arguments(p.oid) !~ '"any"|any|internal'
            AND p.proname IN ('octet_length', 'gen_random_uuid', 'json_typeof', 'clock_timestamp', 'now', 'md5', 'substr', 'to_timestamp', 'format',
                'pg_current_xact_id', 'pg_current_snapshot', 'pg_visible_in_snapshot', 'pg_column_size', 'current_setting', 'to_jsonb', 'length')
    LOOP
        EXECUTE format('CREATE FUNCTION hostile.%I(%s) RETURNS %s LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.caught(); END $$', f.proname, f.arguments, f.returns);
    END LOOP;
    -- The operators of these types, and those that nothing in pg_catalog fits exactly.
    FOR o IN
        SELECT DISTINCT a.t AS l, b.t AS r, n.name, n.returns
        FROM unnest(ARRAY['bigint', 'integer', 'text', 'timestamptz', 'uuid', 'xid8', 'boolean', 'jsonb', 'varchar']) a (t),
            unnest(ARRAY['bigint', 'integer', 'text', 'timestamptz', 'uuid', 'xid8', 'boolean', 'jsonb', 'varchar']) b (t),
            (VALUES ('=', 'boolean'), ('<>', 'boolean'), ('<', 'boolean'), ('>', 'boolean'), ('<=', 'boolean'), ('>=', 'boolean'),
                ('%', 'bigint'), ('+', 'bigint'), ('-', 'bigint'), ('*', 'bigint'), ('/', 'bigint'), ('||', 'text'), ('~~', 'boolean')) n (name, returns)
        WHERE a.t = b.t OR (a.t IN ('bigint', 'integer') AND b.t IN ('bigint', 'integer')) OR (a.t IN ('text', 'varchar') AND b.t IN ('text', 'varchar'))
    LOOP
        EXECUTE format('CREATE FUNCTION hostile.operate(%s, %s, OUT %s) LANGUAGE plpgsql AS $$ BEGIN PERFORM hostile.caught(); END $$',
            o.l, o.r, o.returns);
        EXECUTE format('CREATE OPERATOR hostile.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = hostile.operate)', o.name, o.l, o.r);
        EXECUTE format('ALTER FUNCTION hostile.operate(%s, %s) RENAME TO %I', o.l, o.r, 'f' || md5(o.l || o.r || o.name));
    END LOOP;
END $do$;
CREATE TABLE hostile.messages (); CREATE TABLE hostile.meta (); CREATE TABLE hostile.cursors (); CREATE TABLE hostile.boot ();`

// Somebody puts a schema before the system's into a role's search path, with
// functions and operators of the same names. Nothing of it is used to publish, where
// the session is the caller's, or to consume: a Consumer says what its search path
// is, and the SQL function publish has its own.
func TestLeastPrivilegeUnderAHostileSearchPath(t *testing.T) {
	t.Parallel()

	for _, path := range []string{"hostile, pg_catalog", "hostile", "''"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()

			m := newManaged(t)
			m.execRaw(hostileObjects)
			for _, role := range []string{m.roles.Publisher, m.roles.Consumer} {
				m.execRaw("ALTER ROLE " + quoteIdentifier(role) + " SET search_path = " + path)
			}
			if path == "hostile, pg_catalog" {
				_, err := m.poolAs(m.roles.Consumer).Exec(t.Context(), "SELECT now()")
				require.ErrorContains(t, err, "a hostile object was used")
			}
			m.wholePath(t, outbox.ModePoll)
		})
	}
}
