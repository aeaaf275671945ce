package tests

import (
	"errors"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

// callPublish calls the SQL function as a session with an empty search_path
// does, so that a name it does not qualify is found nowhere.
func (f *fixture) callPublish(t testing.TB, arguments string, args ...any) (string, error) {
	t.Helper()
	conn := f.connect(t)
	_, err := conn.Exec(t.Context(), "SET search_path = ''")
	require.NoError(t, err)
	var id string
	err = conn.QueryRow(t.Context(), f.sql("SELECT outbox.publish("+arguments+")"), args...).Scan(&id)
	require.NoError(t, conn.Close(t.Context()))
	return id, err
}

// Triggers, and producers in other languages, publish by SQL. What they write
// is delivered like everything else.
func TestSQLPublish(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	long := strings.Repeat("é", 512)
	var sent []*message.Message
	for _, call := range []struct {
		arguments string
		args      []any
		want      *message.Message
		key       any
	}{
		{`$1, '\x00ff'`, []any{"orders"}, withMetadata("", []byte{0, 0xff}, nil), nil},
		{`topic => $1, payload => 'x', uuid => 'mine'`, []any{"orders"}, withMetadata("mine", []byte("x"), nil), nil},
		{`'orders', NULL, '{"a": "\"b\"", "é": "\u00fc"}', 'k1', ''`, nil, withMetadata("", nil, message.Metadata{"a": `"b"`, "é": "ü"}), "k1"},
		{`'orders', '', NULL, '', $1, now()`, []any{long}, withMetadata(long, []byte{}, nil), nil},
		{`'orders', 'x', '{}', $1, NULL, '-infinity'`, []any{long}, withMetadata("", []byte("x"), nil), long},
	} {
		got, err := f.callPublish(t, call.arguments, call.args...)
		require.NoError(t, err, call.arguments)
		row := f.stored(t, "orders")[len(sent)]
		require.Equal(t, row.UUID, got, call.arguments)
		if call.want.UUID == "" && !strings.HasSuffix(call.arguments, "''") {
			_, err := uuid.Parse(got)
			require.NoError(t, err, "a default UUID is one")
			call.want.UUID = got
		}
		require.Equal(t, call.want.UUID, got, call.arguments)
		if call.key == nil {
			require.Nil(t, row.Key, "%s: no key, and not an empty one that all those messages would share", call.arguments)
		} else {
			require.NotNil(t, row.Key, call.arguments)
			require.Equal(t, call.key, *row.Key, call.arguments)
		}
		sent = append(sent, call.want)
	}
	f.requireStored(t, "orders", sent)
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	requireDelivered(t, messages, sent)
}

func TestSQLPublishRefusesInput(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	long := strings.Repeat("é", 513)
	const invalid = "22023"
	for _, call := range []struct {
		arguments string
		args      []any
		code      string
		says      string
	}{
		{`'', 'x'`, nil, invalid, "topic must have 1 to 1024 bytes, has 0"},
		{`NULL, 'x'`, nil, invalid, "topic must have 1 to 1024 bytes, has 0"},
		{`$1, 'x'`, []any{long}, invalid, "topic must have 1 to 1024 bytes, has 1026"},
		{`'orders', 'x', '{}', $1`, []any{long}, invalid, "ordering key must have at most 1024 bytes, has 1026"},
		{`'orders', 'x', uuid => $1`, []any{long}, invalid, "uuid must have at most 1024 bytes, has 1026"},
		{`'orders', 'x', '[]'`, nil, invalid, "metadata must be a JSON object of strings, is array"},
		{`'orders', 'x', '"a"'`, nil, invalid, "is string"},
		{`'orders', 'x', 'null'`, nil, invalid, "is null"},
		{`'orders', 'x', '{"a": "b", "n": 1}'`, nil, invalid, "n is not a string"},
		{`'orders', 'x', '{"a": null}'`, nil, invalid, "a is not a string"},
		{`'orders', 'x', '{"a": {"b": "c"}}'`, nil, invalid, "a is not a string"},
		{`'orders', 'x', '{"a"'`, nil, "22P02", "json"},
		{`'', 'x', deliver_at => now() + interval '1 hour'`, nil, invalid, "topic must have 1 to 1024 bytes, has 0"},
	} {
		_, err := f.callPublish(t, call.arguments, call.args...)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, call.arguments)
		require.Equal(t, call.code, pgErr.Code, "%s: %v", call.arguments, err)
		require.Contains(t, pgErr.Message, call.says, call.arguments)
	}
	require.Zero(t, f.number("SELECT count(*) FROM outbox.messages"))
	require.Zero(t, f.number("SELECT count(*) FROM outbox.deferred"))
}

// The case the function is for: whoever changes the row, with whatever tool,
// the message comes with it, or neither.
func TestSQLPublishFromTrigger(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("publisher")
	f.grant(schema.Roles{Publisher: role})
	f.exec(`
		CREATE TABLE orders (id int PRIMARY KEY, state text NOT NULL);
		CREATE FUNCTION announce() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM outbox.publish('orders', convert_to(NEW.state, 'UTF8'), json_build_object('op', TG_OP), NEW.id::text);
			RETURN NEW;
		END $$;
		CREATE TRIGGER announce AFTER INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION announce();
		GRANT SELECT, INSERT, UPDATE ON orders TO ` + quoteIdentifier(role))
	pool := f.poolAs(role)
	exec := func(text string) error {
		_, err := pool.Exec(t.Context(), text)
		return err
	}
	require.NoError(t, exec("INSERT INTO orders VALUES (1, 'placed'), (2, 'placed')"))
	require.NoError(t, exec("BEGIN; UPDATE orders SET state = 'lost'; ROLLBACK"))
	require.NoError(t, exec("UPDATE orders SET state = 'paid' WHERE id = 2"))
	err := exec("INSERT INTO orders VALUES (3, 'placed'), (1, 'placed')")
	var pgErr *pgconn.PgError
	require.True(t, errors.As(err, &pgErr) && pgErr.Code == "23505", "%v", err)

	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	var got []string
	for _, msg := range receive(t, messages, 3) {
		got = append(got, msg.Metadata.Get("op")+" "+string(msg.Payload))
	}
	require.Equal(t, []string{"INSERT placed", "INSERT placed", "UPDATE paid"}, got)
	require.Len(t, f.stored(t, "orders"), 3)
}
