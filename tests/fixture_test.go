package tests

import (
	"cmp"
	"context"
	"os"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// oddSchema is the schema of every test: whatever is not quoted properly fails
// everywhere.
const oddSchema = `Odd "outbox"; 'x'`

// waitFor is how long a test waits for what must happen.
const waitFor = 30 * time.Second

// testMode is how consumers read whose test does not say: OUTBOX_TEST_MODE, or
// the default.
var testMode = outbox.Mode(cmp.Or(os.Getenv("OUTBOX_TEST_MODE"), string(outbox.ModeAuto)))

// fixture is an outbox in a database of its own.
type fixture struct {
	t    testing.TB
	url  string
	pool *pgxpool.Pool
}

// installed is a database with the tables in it.
var installed = &pgtest.Original{Prepare: func(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	// No test takes hours, and each statement is planned for each partition.
	return schema.Migrate(ctx, pool, schema.Config{Name: oddSchema, LookAhead: time.Hour})
}}

// newFixture creates a database with the tables in it.
func newFixture(t testing.TB) *fixture {
	t.Helper()
	url := pgtest.DatabaseLike(t, installed)
	return &fixture{t: t, url: url, pool: pgtest.Pool(t, url)}
}

func fixtureAt(t testing.TB, url string) *fixture {
	t.Helper()
	f := &fixture{t: t, url: url, pool: pgtest.Pool(t, url)}
	require.NoError(t, schema.Migrate(t.Context(), f.pool, schema.Config{Name: oddSchema}))
	return f
}

// sql is an SQL text with the schema's name filled in.
func (f *fixture) sql(text string) string { return schema.Text(oddSchema, text) }

// exec runs a statement that must work.
func (f *fixture) exec(text string, args ...any) {
	f.t.Helper()
	_, err := f.pool.Exec(f.t.Context(), f.sql(text), args...)
	require.NoError(f.t, err)
}

// number returns the number that a query returns.
func (f *fixture) number(text string, args ...any) int {
	f.t.Helper()
	var n int
	require.NoError(f.t, f.pool.QueryRow(f.t.Context(), f.sql(text), args...).Scan(&n))
	return n
}

func (f *fixture) publisher(config outbox.PublisherConfig) *outbox.Publisher {
	f.t.Helper()
	config.Schema = oddSchema
	publisher, err := outbox.NewPublisher(f.pool, config, nil)
	require.NoError(f.t, err)
	return publisher
}

// consumer returns a Consumer with short intervals, closed at the end.
func (f *fixture) consumer(change func(*outbox.ConsumerConfig)) *outbox.Consumer {
	f.t.Helper()
	return f.consumerOn(f.pool.Config(), change)
}

// consumerOn is consumer with a connection configuration of the test's.
func (f *fixture) consumerOn(db *pgxpool.Config, change func(*outbox.ConsumerConfig)) *outbox.Consumer {
	f.t.Helper()
	config := outbox.ConsumerConfig{
		Schema: oddSchema, PollInterval: 10 * time.Millisecond, CheckpointInterval: 20 * time.Millisecond, Mode: testMode,
		// Tests of it make its passes when they want them.
		Maintenance: outbox.MaintenanceConfig{Disabled: true},
	}
	if change != nil {
		change(&config)
	}
	consumer, err := outbox.NewConsumer(db, config, testLogger(f.t))
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, consumer.Close()) })
	return consumer
}

// subscribe subscribes with a Subscriber of its own.
func (f *fixture) subscribe(consumer *outbox.Consumer, config outbox.SubscriberConfig, topic string) (*outbox.Subscriber, <-chan *message.Message) {
	f.t.Helper()
	subscriber, err := outbox.NewSubscriber(consumer, config, nil)
	require.NoError(f.t, err)
	messages, err := subscriber.Subscribe(context.Background(), topic)
	require.NoError(f.t, err)
	return subscriber, messages
}

// receive acks and returns the next n messages.
func receive(t testing.TB, messages <-chan *message.Message, n int) []*message.Message {
	t.Helper()
	return receiveWith(t, messages, n, func(int, *message.Message) {})
}

// receiveWith is receive, and shows each message to look before it is acked.
func receiveWith(t testing.TB, messages <-chan *message.Message, n int, look func(i int, msg *message.Message)) []*message.Message {
	t.Helper()
	var received []*message.Message
	timeout := time.After(waitFor)
	for len(received) < n {
		select {
		case msg, ok := <-messages:
			require.True(t, ok, "channel closed after %d of %d messages", len(received), n)
			look(len(received), msg)
			require.True(t, msg.Ack())
			received = append(received, msg)
		case <-timeout:
			require.FailNow(t, "messages missing", "%d of %d received", len(received), n)
		}
	}
	return received
}

// newMessages returns n messages whose payloads number them.
func newMessages(n int) []*message.Message {
	messages := make([]*message.Message, n)
	for i := range messages {
		messages[i] = message.NewMessage(watermill.NewUUID(), []byte{byte(i >> 16), byte(i >> 8), byte(i)})
	}
	return messages
}

func uuids(messages []*message.Message) []string {
	list := make([]string, len(messages))
	for i, msg := range messages {
		list[i] = msg.UUID
	}
	return list
}
