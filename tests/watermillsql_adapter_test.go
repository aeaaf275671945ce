package tests

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/envelope"
	"github.com/millrace/watermill-outbox/schema"
	"github.com/millrace/watermill-outbox/schema/watermillsql"
)

// adapterPublisher is watermill-sql's Publisher that writes our rows.
func adapterPublisher(t testing.TB, db wsql.ContextExecutor, config watermillsql.AdapterConfig) *wsql.Publisher {
	t.Helper()
	config.Schema = oddSchema
	adapter, err := watermillsql.NewAdapter(config)
	require.NoError(t, err)
	publisher, err := wsql.NewPublisher(db, wsql.PublisherConfig{SchemaAdapter: adapter}, nil)
	require.NoError(t, err)
	return publisher
}

// Existing code keeps its sql.NewPublisher(tx, …), and writes what a Publisher of
// ours writes, with no more privileges.
func TestForwardWatermillSQLAdapterWritesTheRowsOfAPublisher(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("publisher")
	f.grant(schema.Roles{Publisher: role})
	topics := 0
	for _, d := range sqlDrivers {
		db := openSQL(t, d.driver, withParameter(t, f.urlAs(role), d.parameter, d.value))
		for _, n := range []int{1, 2, 3, 200} {
			topics++
			topic := "topic-" + strconv.Itoa(topics)
			sent := variety(n)
			all, now, later := mixed(n)
			for _, commit := range []bool{false, true} {
				tx := begin(t, db)
				publisher := adapterPublisher(t, tx, watermillsql.AdapterConfig{})
				require.NoError(t, publisher.Publish(topic))
				require.NoError(t, publisher.Publish(topic, sent...))
				require.NoError(t, publisher.Publish(topic+".delayed", all...))
				require.NoError(t, publisher.Close())
				require.Empty(t, f.stored(t, topic))
				if !commit {
					require.NoError(t, tx.Rollback())
					continue
				}
				require.NoError(t, tx.Commit())
			}
			f.requireStored(t, topic, sent)
			f.requireStored(t, topic+".delayed", now)
			f.requireDeferred(t, topic+".delayed", later)
		}
	}
}

func TestForwardWatermillSQLAdapterHonoursKeysAndContexts(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for _, driver := range oldDrivers {
		publisher := adapterPublisher(t, openSQL(t, driver, f.url), watermillsql.AdapterConfig{})
		sent := newMessages(3)
		sent[0].Metadata.Set(outbox.DefaultKeyMetadata, `"order' 1\`)
		sent[2].SetContext(delay.WithContext(t.Context(), delay.For(time.Hour)))
		require.NoError(t, publisher.Publish(driver, sent...))
		rows := f.stored(t, driver)
		require.Len(t, rows, 2)
		require.Equal(t, `"order' 1\`, *rows[0].Key)
		require.Nil(t, rows[1].Key)
		waiting := f.deferred(t, driver)
		require.Len(t, waiting, 1)
		require.Equal(t, sent[2].UUID, waiting[0].UUID)

		_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, driver)
		require.Equal(t, uuids(sent[:2]), uuids(receive(t, messages, 2)))
	}
}

// The forwarder's Publisher around watermill-sql's, one per transaction, is what
// Watermill's documentation recommends.
func TestForwardWatermillSQLAdapterUnwrapsEnvelopes(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for _, driver := range oldDrivers {
		tx := begin(t, openSQL(t, driver, f.url))
		publisher := forwarding(adapterPublisher(t, tx, watermillsql.AdapterConfig{UnwrapEnvelopes: forwarderTopic}))
		topic := "a topic's \"name\" of " + driver
		sent := variety(20)
		require.NoError(t, publisher.Publish(topic, sent...))
		require.NoError(t, tx.Commit())
		f.requireStored(t, topic, sent)
	}
	require.Empty(t, f.stored(t, forwarderTopic))
}

// The same errors as a Publisher's, before any SQL: the order is not lost with
// the message.
func TestForwardWatermillSQLAdapterRefusesBeforeAnySQL(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for _, driver := range oldDrivers {
		tx := begin(t, openSQL(t, driver, f.url))
		publisher := adapterPublisher(t, tx, watermillsql.AdapterConfig{UnwrapEnvelopes: forwarderTopic})
		good := message.NewMessage("good", nil)
		for field, msg := range map[string]*message.Message{
			"uuid":         message.NewMessage("\x00", nil),
			"metadata":     withMetadata("1", nil, message.Metadata{badUTF8: "a"}),
			"ordering key": withMetadata("1", nil, message.Metadata{outbox.DefaultKeyMetadata: strings.Repeat("x", 1025)}),
		} {
			err := publisher.Publish(driver, good, msg)
			var invalid *outbox.MessageError
			require.ErrorAs(t, err, &invalid, field)
			require.Equal(t, 1, invalid.Index)
			require.Equal(t, field, invalid.Field)
			require.Equal(t, driver, invalid.Topic)
		}
		require.ErrorIs(t, publisher.Publish(forwarderTopic, good), envelope.ErrNotEnvelope)
		require.ErrorIs(t, publisher.Publish(strings.Repeat("x", 1025), good), outbox.ErrInvalidTopic)
		require.ErrorIs(t, publisher.Publish(driver, newMessages(watermillsql.MaxMessages+1)...), outbox.ErrCallTooLarge)

		sent := newMessages(watermillsql.MaxMessages)
		require.NoError(t, publisher.Publish(driver, sent...), "the transaction is usable")
		require.NoError(t, tx.Commit())
		require.Equal(t, uuids(sent), f.storedUUIDs(t, driver))
	}
}

// failures is a BackoffManager that hands on the errors it is told.
type failures chan error

func (f failures) HandleError(_ watermill.LoggerAdapter, _ bool, err error) time.Duration {
	if err != nil {
		select {
		case f <- err:
		default:
		}
	}
	return time.Millisecond
}

// There is nothing for watermill-sql to make, and nothing it could read by.
func TestForwardWatermillSQLAdapterOnlyWrites(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	tables := func() int { return f.number("SELECT count(*)::int FROM pg_class WHERE relname LIKE 'watermill%'") }
	for _, driver := range oldDrivers {
		db := openSQL(t, driver, f.url)
		adapter, err := watermillsql.NewAdapter(watermillsql.AdapterConfig{Schema: oddSchema})
		require.NoError(t, err)
		publisher, err := wsql.NewPublisher(db, wsql.PublisherConfig{SchemaAdapter: adapter, AutoInitializeSchema: true}, nil)
		require.NoError(t, err)
		require.NoError(t, publisher.Publish("auto", newMessages(1)...))
	}
	require.Zero(t, tables())
	require.Len(t, f.stored(t, "auto"), 2)

	for _, driver := range oldDrivers {
		db := openSQL(t, driver, f.url)
		oldTable(t, db, "orders", "JSON")
		adapter, err := watermillsql.NewAdapter(watermillsql.AdapterConfig{Schema: oddSchema})
		require.NoError(t, err)
		failed := make(failures, 1)
		subscriber, err := wsql.NewSubscriber(db, wsql.SubscriberConfig{
			SchemaAdapter: adapter, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{}, BackoffManager: failed,
		}, nil)
		require.NoError(t, err)
		_, err = subscriber.Subscribe(t.Context(), "orders")
		require.NoError(t, err)
		require.ErrorIs(t, await(t, failed), watermillsql.ErrWriteOnly, driver)
		require.NoError(t, subscriber.Close())
	}
}
