package watermillsql

import (
	"cmp"
	stdsql "database/sql"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/record"
	"github.com/millrace/watermill-outbox/schema"
)

// MaxMessages is the most messages of one Publish call through an Adapter: each
// takes up to six parameters of a statement, which may have 65,535.
const MaxMessages = 10_000

// AdapterConfig configures an Adapter. The zero value works. The fields are
// those of outbox.PublisherConfig, and mean the same.
type AdapterConfig struct {
	// Schema is the schema the outbox tables live in. Defaults to
	// schema.DefaultName ("outbox").
	Schema string

	// OrderingKey returns the ordering key of a message. Defaults to the
	// metadata value under outbox.DefaultKeyMetadata.
	OrderingKey func(topic string, msg *message.Message) string

	// MaxPayloadBytes refuses longer payloads, at most
	// outbox.LimitPayloadBytes. Defaults to outbox.DefaultMaxPayloadBytes.
	MaxPayloadBytes int

	// UnwrapEnvelopes is the topic whose messages are envelopes of Watermill's
	// forwarder.NewPublisher: the rows are those of the messages inside.
	// Defaults to "", which unwraps nothing.
	UnwrapEnvelopes string
}

func (c AdapterConfig) withDefaults() AdapterConfig {
	c.Schema = cmp.Or(c.Schema, schema.DefaultName)
	c.MaxPayloadBytes = cmp.Or(c.MaxPayloadBytes, outbox.DefaultMaxPayloadBytes)
	if c.OrderingKey == nil {
		c.OrderingKey = outbox.KeyFromMetadata(outbox.DefaultKeyMetadata)
	}
	return c
}

func (c AdapterConfig) validate() error {
	if err := schema.ValidateName(c.Schema); err != nil {
		return fmt.Errorf("watermillsql: AdapterConfig.Schema: %w", err)
	}
	if c.MaxPayloadBytes < 0 || c.MaxPayloadBytes > outbox.LimitPayloadBytes {
		return fmt.Errorf("watermillsql: AdapterConfig.MaxPayloadBytes must be between 1 and %d, is %d", outbox.LimitPayloadBytes, c.MaxPayloadBytes)
	}
	if c.UnwrapEnvelopes != "" {
		if err := outbox.ValidateTopic(c.UnwrapEnvelopes); err != nil {
			return fmt.Errorf("watermillsql: AdapterConfig.UnwrapEnvelopes: %w", err)
		}
	}
	return nil
}

// Adapter is a SchemaAdapter of watermill-sql for a Publisher, which then writes
// what an outbox.Publisher writes: the same rows, with the same bounds. It works
// with pgx's stdlib and lib/pq, and is safe for concurrent use.
//
// What it cannot change is watermill-sql's: topics have only the characters that
// it allows, the transaction is the one its Publisher was made for, and the
// contexts of messages bound nothing. New code uses outbox.NewPublisher, which
// also writes large calls faster.
type Adapter struct {
	maker record.Maker
	text  adapterText
}

var _ sql.SchemaAdapter = (*Adapter)(nil)

// NewAdapter returns an Adapter. An error names the field of the configuration
// that cannot be.
func NewAdapter(config AdapterConfig) (*Adapter, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	delays, err := record.NewDelayReader()
	if err != nil {
		return nil, fmt.Errorf("watermillsql: new adapter: %w", err)
	}
	return &Adapter{
		maker: record.Maker{
			OrderingKey: config.OrderingKey, Envelopes: config.UnwrapEnvelopes, Delays: delays,
			MaxPayloadBytes: config.MaxPayloadBytes, TooLong: "AdapterConfig.MaxPayloadBytes",
		},
		text: newAdapterText(config.Schema),
	}, nil
}

// InsertQuery returns the one statement that writes the messages, in their
// order. Bad input is refused with outbox.ErrInvalidTopic, an
// *outbox.MessageError, or outbox.ErrCallTooLarge beyond MaxMessages or 256 MiB;
// Publish returns the error, has run no SQL then, and a transaction stays usable.
func (a *Adapter) InsertQuery(topic string, messages message.Messages) (sql.Query, error) {
	if len(messages) == 0 {
		return sql.Query{Query: "SELECT 1 WHERE false"}, nil // it is run whatever it is
	}
	if err := outbox.ValidateTopic(topic); err != nil {
		return sql.Query{}, err
	}
	if len(messages) > MaxMessages {
		return sql.Query{}, fmt.Errorf("%w: %d messages, the limit of watermill-sql's statements is %d", outbox.ErrCallTooLarge, len(messages), MaxMessages)
	}
	records, problem := a.maker.Records(topic, messages)
	if problem != nil {
		return sql.Query{}, (*outbox.MessageError)(problem)
	}
	if n := record.Bytes(records); n > record.MaxCallBytes && len(records) > 1 {
		return sql.Query{}, fmt.Errorf("%w: %d, the limit of a call through database/sql is %d", outbox.ErrCallTooLarge, n, record.MaxCallBytes)
	}
	if slices.ContainsFunc(records, func(r record.Record) bool { return r.Due != nil }) {
		return a.text.due(records), nil
	}
	return a.text.now(records), nil
}

// SelectQuery is for subscribers, which an Adapter does not serve. It cannot
// return an error, so the query has one row, and UnmarshalMessage, which is given
// it, returns ErrWriteOnly.
func (a *Adapter) SelectQuery(string, string, sql.OffsetsAdapter) sql.Query {
	return sql.Query{Query: "SELECT 1"}
}

// UnmarshalMessage returns ErrWriteOnly.
func (a *Adapter) UnmarshalMessage(sql.Scanner) (sql.Row, error) {
	return sql.Row{}, ErrWriteOnly
}

// SchemaInitializingQueries returns none, whatever AutoInitializeSchema says:
// there is no table for each topic, and schema.Migrate made those there are.
func (a *Adapter) SchemaInitializingQueries(string) []sql.Query { return nil }

// SubscribeIsolationLevel returns the default.
func (a *Adapter) SubscribeIsolationLevel() stdsql.IsolationLevel { return stdsql.LevelDefault }

// adapterText holds what the statements for one schema have in common. The values
// are scalars, since drivers agree on no type of array; every one has its type,
// since they may be NULL in all rows.
type adapterText struct {
	nowHead         string
	dueHead, dueEnd string
}

func newAdapterText(schemaName string) adapterText {
	return adapterText{
		nowHead: schema.Text(schemaName, "INSERT INTO outbox.messages (topic, key, uuid, metadata, payload) VALUES "),
		// As outbox.Publisher's statement for messages that may have to wait: which
		// table each goes to is asked once, of the server's clock.
		dueHead: `WITH call AS MATERIALIZED (
	SELECT v.*, coalesce(v.due_at > clock_timestamp(), false) AS waits FROM (VALUES `,
		dueEnd: schema.Text(schemaName, `) AS v (n, topic, key, uuid, metadata, payload, due_at)
), waiting AS (
	INSERT INTO outbox.deferred (due_at, topic, key, uuid, metadata, payload)
	SELECT c.due_at, c.topic, c.key, c.uuid, c.metadata, c.payload FROM call c WHERE c.waits ORDER BY c.n
)
INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
SELECT c.topic, c.key, c.uuid, c.metadata, c.payload FROM call c WHERE NOT c.waits ORDER BY c.n`),
	}
}

// now returns the statement for records that do not wait.
func (t adapterText) now(records []record.Record) sql.Query {
	var l valueList
	l.text.WriteString(t.nowHead)
	for i, r := range records {
		l.open(i)
		l.add(r)
		l.text.WriteByte(')')
	}
	return sql.Query{Query: l.text.String(), Args: l.args}
}

// due returns the statement for records of which some may have to wait.
func (t adapterText) due(records []record.Record) sql.Query {
	var l valueList
	l.text.WriteString(t.dueHead)
	for i, r := range records {
		l.open(i)
		l.text.WriteString(strconv.Itoa(i) + ",")
		l.add(r)
		l.text.WriteByte(',')
		l.value(nullable(r.Due), "::text::timestamptz")
		l.text.WriteByte(')')
	}
	l.text.WriteString(t.dueEnd)
	return sql.Query{Query: l.text.String(), Args: l.args}
}

// valueList builds the rows of VALUES.
type valueList struct {
	text strings.Builder
	args []any
}

func (l *valueList) open(row int) {
	if row > 0 {
		l.text.WriteByte(',')
	}
	l.text.WriteByte('(')
}

// add adds the five values that every row has.
func (l *valueList) add(r record.Record) {
	l.value(r.Topic, "::text,")
	l.value(nullable(r.Key), "::text,")
	l.value(r.UUID, "::text,")
	l.value(r.Metadata, "::text::json,")
	var payload any // a nil []byte is not NULL to every driver
	if r.Payload != nil {
		payload = r.Payload
	}
	l.value(payload, "::bytea")
}

func (l *valueList) value(arg any, suffix string) {
	l.args = append(l.args, arg)
	l.text.WriteString("$" + strconv.Itoa(len(l.args)) + suffix)
}

// nullable returns a plain nil for nil, and a value that logs as what it is.
func nullable(s *string) any {
	if s == nil {
		return nil
	}
	return *s
}
