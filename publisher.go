package outbox

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/record"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// DefaultKeyMetadata is the metadata key whose value is a message's
	// ordering key, as in Watermill's examples and Kafka Pub/Sub.
	DefaultKeyMetadata = "partition_key"

	// DefaultMaxPayloadBytes bounds a payload unless configured otherwise.
	DefaultMaxPayloadBytes = 64 << 20
	// LimitPayloadBytes is the most MaxPayloadBytes may be: logical decoding
	// fails near 1 GB of text, and bytes take two characters each there.
	LimitPayloadBytes = 256 << 20

	// constructTimeout bounds what constructors ask of the database.
	constructTimeout = 10 * time.Second
)

// PublisherConfig configures a Publisher. The zero value works.
type PublisherConfig struct {
	// Schema is the schema the outbox tables live in. Defaults to
	// schema.DefaultName ("outbox").
	Schema string

	// RequireTx makes Publish fail with ErrNoTransaction unless a transaction
	// comes with the message's context or was given to NewPublisher; a
	// connection of pgx's counts as one while it is in a transaction. Without
	// it, a message that comes without one is written through the handle
	// given to NewPublisher, in a transaction of its own: fine for messages
	// that announce no change of data, a lost guarantee for others. Set it in
	// services that publish only within transactions. Defaults to false.
	RequireTx bool

	// TxResolver finds the transaction in a context that ContextWithTx did not
	// make, for applications with a context key of their own. It is asked when
	// the context has none from ContextWithTx; ok=false means that there is
	// none. It must be safe for concurrent use. Defaults to nil.
	TxResolver func(ctx context.Context) (tx any, ok bool)

	// OrderingKey returns the ordering key of a message: messages of a topic
	// with the same key are delivered in causal order even to subscribers
	// that handle keys in parallel. "" means that the message is ordered with
	// none. At most MaxOrderingKeyBytes. It must not change the message and
	// must be safe for concurrent use. Defaults to the metadata value under
	// DefaultKeyMetadata; see KeyFromMetadata for another metadata key.
	OrderingKey func(topic string, msg *message.Message) string

	// TransactionPooler says that handles lead to a pooler that lends its
	// connections to the server for one transaction each, such as PgBouncer with
	// pool_mode=transaction, where what one statement has prepared is not there
	// for the next. The Publisher then prepares nothing, whatever the query mode
	// of pgx, and through an *sql.DB of another driver writes in a transaction of
	// its own. An *sql.Tx, and lib/pq's *sql.Conn, it takes as they are: with
	// pgx's stdlib set default_query_exec_mode=exec in the address, with lib/pq
	// and an *sql.Conn binary_parameters=yes. It costs the server some planning
	// for each call. Not needed where the handle prepares nothing anyway, or the
	// pooler keeps track of prepared statements (PgBouncer 1.21 and newer, with
	// max_prepared_statements). Defaults to false.
	TransactionPooler bool

	// MaxPayloadBytes refuses longer payloads, at most LimitPayloadBytes. Each
	// reader holds a payload in memory as a whole. Defaults to
	// DefaultMaxPayloadBytes.
	MaxPayloadBytes int

	// UnwrapEnvelopes is the topic whose messages are envelopes: those that
	// code which publishes through Watermill's forwarder.NewPublisher makes, its
	// ForwarderTopic ("forwarder_topic" unless it says otherwise). Each is
	// unwrapped before it is stored: the row has the topic, UUID, metadata,
	// payload, ordering key and delay of the message inside, and no Forwarder is
	// needed to read it. What is no envelope is refused there with a
	// *MessageError. Messages to other topics are stored as they come. It takes
	// off one envelope, of two inside each other the outer one. Defaults to "",
	// which unwraps nothing: envelopes are then messages like others, for a
	// Forwarder to subscribe to.
	UnwrapEnvelopes string
}

// KeyFromMetadata returns an OrderingKey function that takes the metadata value
// under the given key.
func KeyFromMetadata(key string) func(topic string, msg *message.Message) string {
	return func(_ string, msg *message.Message) string { return msg.Metadata.Get(key) }
}

func (c PublisherConfig) withDefaults() PublisherConfig {
	c.Schema = cmp.Or(c.Schema, schema.DefaultName)
	c.MaxPayloadBytes = cmp.Or(c.MaxPayloadBytes, DefaultMaxPayloadBytes)
	if c.OrderingKey == nil {
		c.OrderingKey = KeyFromMetadata(DefaultKeyMetadata)
	}
	return c
}

func (c PublisherConfig) validate() error {
	if err := schema.ValidateName(c.Schema); err != nil {
		return fmt.Errorf("outbox: PublisherConfig.Schema: %w", err)
	}
	if c.MaxPayloadBytes < 0 || c.MaxPayloadBytes > LimitPayloadBytes {
		return fmt.Errorf("outbox: PublisherConfig.MaxPayloadBytes must be between 1 and %d, is %d", LimitPayloadBytes, c.MaxPayloadBytes)
	}
	if c.UnwrapEnvelopes != "" {
		if err := ValidateTopic(c.UnwrapEnvelopes); err != nil {
			return fmt.Errorf("outbox: PublisherConfig.UnwrapEnvelopes: %w", err)
		}
	}
	return nil
}

// maker returns what makes the rows, for a configuration with its defaults.
func (c PublisherConfig) maker() (record.Maker, error) {
	delays, err := record.NewDelayReader()
	return record.Maker{
		OrderingKey: c.OrderingKey, Envelopes: c.UnwrapEnvelopes, Delays: delays,
		MaxPayloadBytes: c.MaxPayloadBytes, TooLong: "PublisherConfig.MaxPayloadBytes",
	}, err
}

// Publisher writes messages into the outbox tables, inside the caller's
// transaction: a message exists if, and only if, that transaction commits. It
// implements message.Publisher and is safe for concurrent use, as far as the
// database handles are (a transaction is not).
type Publisher struct {
	config PublisherConfig
	logger watermill.LoggerAdapter
	text   insertText
	// base is used when the context carries no transaction; its handle is nil
	// if NewPublisher got none.
	base executor
	// maker makes the rows of messages.
	maker record.Maker

	// mu guards closed, and the step from it to running: Publish is counted
	// before Close waits, or refused. It is not held for longer, since calls
	// that waited for it behind Close could hold the connections that the calls
	// before it need.
	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher returns a Publisher that writes through db: a *pgxpool.Pool, a
// *pgxpool.Conn, a *pgx.Conn, a pgx.Tx, an *sql.DB, an *sql.Conn or an *sql.Tx
// (database/sql with pgx's stdlib or lib/pq). A transaction in a message's
// context takes precedence over a pool or a connection. db may be nil with
// RequireTx; then every transaction comes from a context.
//
// The handle stays the caller's: it is neither closed nor committed. No DDL is
// ever run. If db is a pool, the tables are looked for at once, for at most
// ten seconds; a wrong address, missing tables (ErrNotInstalled), another
// version of them (*schema.VersionError), a missing privilege or a read-only
// server (ErrReadOnly) are reported here. A nil logger logs nothing.
func NewPublisher(db any, config PublisherConfig, logger watermill.LoggerAdapter) (*Publisher, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	maker, err := config.maker()
	if err != nil {
		return nil, fmt.Errorf("outbox: new publisher: %w", err)
	}
	p := &Publisher{config: config, logger: logger, text: newInsertText(config.Schema), maker: maker}
	if db == nil {
		if !config.RequireTx {
			return nil, fmt.Errorf("%w: it is nil, which is allowed only with RequireTx", ErrUnsupportedExecutor)
		}
		return p, nil
	}
	base, err := newExecutor(db)
	if err != nil {
		return nil, err
	}
	p.base = base
	if isPool(db) {
		ctx, cancel := context.WithTimeout(context.Background(), constructTimeout)
		defer cancel()
		err := p.on(ctx, base, func(db executor) error {
			if row, ok := db.row(); ok {
				return checkPublisher(ctx, row, config.Schema)
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("outbox: new publisher: %w", explainPrepared(err))
		}
	}
	return p, nil
}

// isPool reports whether a handle is a pool of connections: asking it something
// disturbs nobody. pgxpool's and database/sql's pools are what can be pinged
// and hands out connections.
func isPool(handle any) bool {
	switch handle.(type) {
	case interface{ Reset() }: // *pgxpool.Pool
		return true
	case interface{ SetMaxOpenConns(n int) }: // *sql.DB
		return true
	}
	return false
}

// publisherText asks for all that a publisher needs.
const publisherText = `
SELECT c.oid IS NOT NULL, coalesce(pg_catalog.has_column_privilege(c.oid, 'payload', 'INSERT'), false),
       pg_catalog.pg_is_in_recovery() OR pg_catalog.current_setting('transaction_read_only')::bool, current_user::text
FROM pg_catalog.pg_namespace n LEFT JOIN pg_catalog.pg_class c ON c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) 'messages'
WHERE n.nspname OPERATOR(pg_catalog.=) $1::text`

func checkPublisher(ctx context.Context, row schema.RowFunc, schemaName string) error {
	if err := schema.RequireVersion(ctx, row, schemaName); err != nil {
		return err
	}
	var exists, insert, readOnly bool
	var role string
	if err := row(ctx, publisherText, []any{schemaName}, &exists, &insert, &readOnly, &role); err != nil {
		return fmt.Errorf("schema %q: look for table messages: %w", schemaName, err)
	}
	switch {
	case !exists:
		return fmt.Errorf("table messages in schema %q does not exist: %w", schemaName, ErrNotInstalled)
	case readOnly:
		return ErrReadOnly
	case !insert:
		return fmt.Errorf("schema %q: role %q lacks INSERT on table messages: run the script printed by schema.Grants", schemaName, role)
	}
	return nil
}

// Publish writes the messages in one statement, all or none, in their order,
// into the transaction that their contexts carry, else through the handle the
// Publisher was made with. It returns once the server has taken them; they
// reach subscribers when the transaction commits. The context of the first
// message bounds the call.
//
// Bad input is refused before any SQL runs, with ErrInvalidTopic or a
// *MessageError, and the transaction stays usable. An error from the server
// has aborted the transaction, as any failed statement does: roll it back. A
// failed call without a transaction wrote nothing, unless the connection broke
// before the answer came (then it is unknown, and publishing again may store
// the messages twice; UUIDs need not be unique).
//
// A message is scheduled by Watermill's delay component, that is by
// delay.Message, or by delay.WithContext on the message's context, which a CQRS
// bus passes on: it waits in a table of its own, where the same call and the
// same transaction put it, and is delivered when its time has come by the
// database's clock, never sooner. That time is the metadata value
// _watermill_delayed_until, in RFC 3339 with any offset; Watermill writes whole
// seconds, so its delays end up to a second early, and fractions down to the
// microsecond count as well. A time that is past by that clock is no delay, and
// neither is _watermill_delayed_for on its own. One that cannot be read, of
// either, is refused. Both stay in the metadata that subscribers get.
//
// A scheduled message takes its place in the order when it is due, not when it
// was published: what is published with the same ordering key meanwhile goes
// first, and nothing waits for it. Those due together come in the order of their
// due times. It takes a Consumer with a subscription, in any process, to have
// them delivered.
//
// Envelopes sent to PublisherConfig.UnwrapEnvelopes are stored as the messages
// inside, all of a call in the one statement, whatever topics they are for.
//
// Messages are not changed, and not kept after the call. Without messages it
// does nothing.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if !p.begin() {
		return ErrPublisherClosed
	}
	defer p.running.Done()
	if len(messages) == 0 {
		return nil
	}
	if err := ValidateTopic(topic); err != nil {
		return err
	}
	records, problem := p.maker.Records(topic, messages)
	if problem != nil {
		return (*MessageError)(problem)
	}
	db, err := p.executorFor(messages)
	if err != nil {
		return err
	}
	ctx := messages[0].Context()
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("outbox: publish to topic %q: the message's context is already done (Watermill's Timeout middleware leaves such a context on the message; set another one before publishing it again): %w", topic, err)
	}
	err = p.on(ctx, db, func(db executor) error { return p.text.insert(ctx, db, records) })
	if err != nil {
		return fmt.Errorf("outbox: publish %d messages to topic %q: %w", len(messages), topic, explain(err, p.config.Schema))
	}
	if _, silent := p.logger.(watermill.NopLogger); silent {
		return nil // spares building the fields
	}
	for _, r := range records {
		p.logger.Trace("Message written to the outbox", watermill.LogFields{"topic": r.Topic, "message_uuid": r.UUID})
	}
	return nil
}

// begin counts a call as running unless the Publisher is closed.
func (p *Publisher) begin() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.running.Add(1)
	}
	return !p.closed
}

// executorFor returns the one handle all messages agree on.
func (p *Publisher) executorFor(messages []*message.Message) (executor, error) {
	var chosen executor
	for i, msg := range messages {
		ctx := msg.Context()
		if i > 0 && record.Equal(ctx, messages[i-1].Context()) {
			continue // nearly always one context for all
		}
		db, err := p.executorFrom(ctx)
		if err != nil {
			return executor{}, fmt.Errorf("message %d (uuid %.200q): %w", i, msg.UUID, err)
		}
		if i > 0 && !db.same(chosen) {
			return executor{}, fmt.Errorf("message %d (uuid %.200q): %w", i, msg.UUID, ErrMixedExecutors)
		}
		chosen = db
	}
	return chosen, nil
}

func (p *Publisher) executorFrom(ctx context.Context) (executor, error) {
	tx, ok := TxFromContext(ctx)
	if !ok && p.config.TxResolver != nil {
		tx, ok = p.config.TxResolver(ctx)
	}
	if !ok {
		if p.config.RequireTx && !p.base.inTx() {
			return executor{}, fmt.Errorf("%w: RequireTx is set and the message's context carries none, see ContextWithTx", ErrNoTransaction)
		}
		return p.base, nil
	}
	db, err := newExecutor(tx)
	if err != nil {
		return executor{}, fmt.Errorf("transaction in the message's context: %w", err)
	}
	if !db.inTx() {
		return executor{}, fmt.Errorf("%w: the message's context carries a %T, which is no transaction", ErrUnsupportedExecutor, tx)
	}
	if p.base.isTx && !db.same(p.base) {
		return executor{}, fmt.Errorf("%w: the publisher was made for another transaction", ErrMixedExecutors)
	}
	return db, nil
}

// Close makes later Publish calls fail with ErrPublisherClosed and waits for the
// running ones. It may be called more than once. The database handle stays open.
func (p *Publisher) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.running.Wait()
	return nil
}
