package watermillsql

import (
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/envelope"
)

func newAdapter(t testing.TB, config AdapterConfig) *Adapter {
	t.Helper()
	adapter, err := NewAdapter(config)
	require.NoError(t, err)
	return adapter
}

func TestNewAdapterChecksItsConfiguration(t *testing.T) {
	t.Parallel()

	for field, config := range map[string]AdapterConfig{
		"AdapterConfig.Schema":          {Schema: "pg_outbox"},
		"AdapterConfig.MaxPayloadBytes": {MaxPayloadBytes: outbox.LimitPayloadBytes + 1},
		"AdapterConfig.UnwrapEnvelopes": {UnwrapEnvelopes: "\xff"},
	} {
		adapter, err := NewAdapter(config)
		require.ErrorContains(t, err, "watermillsql: "+field)
		require.Nil(t, adapter)
	}
}

// Values are scalars: drivers agree on no type of array.
func TestInsertQuery(t *testing.T) {
	t.Parallel()

	a := newAdapter(t, AdapterConfig{Schema: `a "b"`})
	first := message.NewMessage("1", nil)
	first.Metadata.Set(outbox.DefaultKeyMetadata, "order 1")
	second := &message.Message{UUID: "2", Payload: []byte{}}
	query, err := a.InsertQuery("orders", message.Messages{first, second})
	require.NoError(t, err)
	require.Equal(t, `INSERT INTO "a ""b""".messages (topic, key, uuid, metadata, payload) VALUES `+
		`($1::text,$2::text,$3::text,$4::text::json,$5::bytea),($6::text,$7::text,$8::text,$9::text::json,$10::bytea)`, query.Query)
	require.Equal(t, []any{
		"orders", "order 1", "1", `{"partition_key":"order 1"}`, nil,
		"orders", nil, "2", "{}",
		[]byte{},
	}, query.Args)

	delay.Message(first, delay.Until(time.Date(2031, 1, 2, 3, 4, 5, 0, time.UTC)))
	query, err = a.InsertQuery("orders", message.Messages{first, second})
	require.NoError(t, err)
	require.Len(t, query.Args, 12)
	require.Equal(t, "2031-01-02 03:04:05.000000+00", query.Args[5])
	require.Nil(t, query.Args[11])
	require.Contains(t, query.Query, `INSERT INTO "a ""b""".deferred`)
	require.Contains(t, query.Query, `(1,$7::text,`)

	query, err = a.InsertQuery("orders", nil)
	require.NoError(t, err)
	require.Equal(t, sql.Query{Query: "SELECT 1 WHERE false"}, query)
}

func TestInsertQueryOfEnvelopes(t *testing.T) {
	t.Parallel()

	inner := message.NewMessage("inner", []byte("x"))
	outer, err := envelope.Wrap("orders", inner)
	require.NoError(t, err)
	query, err := newAdapter(t, AdapterConfig{UnwrapEnvelopes: "forwarded"}).InsertQuery("forwarded", message.Messages{outer})
	require.NoError(t, err)
	require.Equal(t, []any{"orders", nil, "inner", "{}", []byte("x")}, query.Args)

	query, err = newAdapter(t, AdapterConfig{}).InsertQuery("forwarded", message.Messages{outer})
	require.NoError(t, err)
	require.Equal(t, []any{"forwarded", nil, outer.UUID, "{}", []byte(outer.Payload)}, query.Args)
}

func TestInsertQueryRefuses(t *testing.T) {
	t.Parallel()

	a := newAdapter(t, AdapterConfig{UnwrapEnvelopes: "forwarded", MaxPayloadBytes: 10})
	good := message.NewMessage("1", nil)
	for _, topic := range []string{"", "a\x00", strings.Repeat("x", 1025)} {
		_, err := a.InsertQuery(topic, message.Messages{good})
		require.ErrorIs(t, err, outbox.ErrInvalidTopic)
	}
	withMetadata := func(key, value string) *message.Message {
		msg := message.NewMessage("1", nil)
		msg.Metadata.Set(key, value)
		return msg
	}
	for field, messages := range map[string]message.Messages{
		"message":      {good, nil},
		"uuid":         {good, message.NewMessage("\x00", nil)},
		"metadata":     {good, withMetadata("a", "\xff")},
		"ordering key": {good, withMetadata(outbox.DefaultKeyMetadata, strings.Repeat("x", 1025))},
		"payload":      {good, message.NewMessage("1", make([]byte, 11))},
	} {
		_, err := a.InsertQuery("orders", messages)
		var invalid *outbox.MessageError
		require.ErrorAs(t, err, &invalid, field)
		require.Equal(t, field, invalid.Field)
		require.Equal(t, 1, invalid.Index)
	}
	_, err := a.InsertQuery("orders", message.Messages{message.NewMessage("1", make([]byte, 11))})
	require.ErrorContains(t, err, "AdapterConfig.MaxPayloadBytes")
	_, err = a.InsertQuery("forwarded", message.Messages{good})
	require.ErrorIs(t, err, outbox.ErrInvalidMessage)
	require.ErrorIs(t, err, envelope.ErrNotEnvelope)
}

func TestInsertQueryBoundsTheCall(t *testing.T) {
	t.Parallel()

	a := newAdapter(t, AdapterConfig{MaxPayloadBytes: outbox.LimitPayloadBytes})
	scheduled := message.NewMessage("1", nil)
	delay.Message(scheduled, delay.For(time.Hour))
	messages := make(message.Messages, MaxMessages)
	for i := range messages {
		messages[i] = scheduled
	}
	query, err := a.InsertQuery("orders", messages)
	require.NoError(t, err)
	require.LessOrEqual(t, len(query.Args), 65535)
	_, err = a.InsertQuery("orders", append(messages, scheduled))
	require.ErrorIs(t, err, outbox.ErrCallTooLarge)

	half := message.NewMessage("1", make([]byte, outbox.LimitPayloadBytes/2))
	_, err = a.InsertQuery("orders", message.Messages{half, half})
	require.ErrorIs(t, err, outbox.ErrCallTooLarge, "the metadata count, too")
	_, err = a.InsertQuery("orders", message.Messages{message.NewMessage("1", make([]byte, outbox.LimitPayloadBytes))})
	require.NoError(t, err, "one always goes")
}

func TestAdapterOnlyWrites(t *testing.T) {
	t.Parallel()

	a := newAdapter(t, AdapterConfig{})
	require.Empty(t, a.SchemaInitializingQueries("orders"))
	_, err := a.UnmarshalMessage(nil)
	require.ErrorIs(t, err, ErrWriteOnly)
	require.Equal(t, sql.Query{Query: "SELECT 1"}, a.SelectQuery("orders", "group", nil))
}
