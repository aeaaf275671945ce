package watermillsql

import (
	"cmp"
	"context"
	"database/sql"
	_ "embed" // the statements
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

// DrainConfig says what to move. Topic must be set.
type DrainConfig struct {
	// Schema is the schema the outbox tables live in. Defaults to
	// schema.DefaultName ("outbox").
	Schema string

	// Topic is the topic of watermill-sql. The rows become messages of the same
	// topic, unless Envelopes is set.
	Topic string

	// ConsumerGroup is the group of watermill-sql whose position says what is
	// left to move. Defaults to "", which is watermill-sql's default.
	ConsumerGroup string

	// MessagesTable and OffsetsTable are the old tables as SQL writes them,
	// quoted where need be, for who has GenerateMessagesTableName or
	// GenerateMessagesOffsetsTableName. Default to "watermill_<topic>" and
	// "watermill_offsets_<topic>", in quotes.
	MessagesTable string
	OffsetsTable  string

	// Envelopes says that the rows are envelopes of Watermill's forwarder. The
	// messages inside are moved, to the topics they are for. Defaults to false.
	Envelopes bool

	// KeyMetadata is the metadata key of the ordering key. Defaults to
	// outbox.DefaultKeyMetadata.
	KeyMetadata string

	// MaxRows bounds the rows of one call. Writers wait for as long as the
	// transaction lasts, so for a big backlog move it in parts, each in a
	// transaction of its own, until Moved is 0. Defaults to 0, which is all.
	MaxRows int
}

func (c DrainConfig) withDefaults() DrainConfig {
	c.Schema = cmp.Or(c.Schema, schema.DefaultName)
	c.MessagesTable = cmp.Or(c.MessagesTable, pgx.Identifier{"watermill_" + c.Topic}.Sanitize())
	c.OffsetsTable = cmp.Or(c.OffsetsTable, pgx.Identifier{"watermill_offsets_" + c.Topic}.Sanitize())
	c.KeyMetadata = cmp.Or(c.KeyMetadata, outbox.DefaultKeyMetadata)
	return c
}

func (c DrainConfig) validate() error {
	if err := schema.ValidateName(c.Schema); err != nil {
		return fmt.Errorf("watermillsql: DrainConfig.Schema: %w", err)
	}
	if err := outbox.ValidateTopic(c.Topic); err != nil {
		return fmt.Errorf("watermillsql: DrainConfig.Topic: %w", err)
	}
	if c.MaxRows < 0 {
		return fmt.Errorf("watermillsql: DrainConfig.MaxRows must not be negative, is %d", c.MaxRows)
	}
	return nil
}

// Drained says what Drain did.
type Drained struct {
	// Moved is how many rows became messages, Scheduled how many of them wait
	// for a delay.
	Moved     int64
	Scheduled int64
	// More says that there are rows which the group has not had: beyond MaxRows,
	// or written by transactions with a higher id than one that still runs,
	// anywhere on the server. Drain again; when nothing moves, that one has to
	// end first.
	More bool
}

//go:embed drain.sql
var drainRows string

//go:embed drain_problem.sql
var drainProblem string

//go:embed drain_move.sql
var drainMove string

const (
	drainPosition = `
SELECT pg_snapshot_xmin(pg_current_snapshot())::text, o.last_processed_transaction_id::text, coalesce(o.offset_acked, 0)
FROM :offsets o WHERE o.consumer_group = $1::text`
	drainMore = `
SELECT EXISTS (SELECT FROM :messages m, :offsets o
	WHERE o.consumer_group = $1::text AND (m.transaction_id, m."offset") > (o.last_processed_transaction_id, coalesce(o.offset_acked, 0)))`
)

// Drain moves the rows of a table of watermill-sql (v3, PostgreSQL) that a
// consumer group has not processed into the outbox, in their order, and the
// group's position behind them. It does so in the caller's transaction, whose
// commit makes both true at once: nothing is lost, nothing there twice, and after
// a rollback all is as it was. The rows stay in the old table. The context bounds
// the call.
//
// It first locks the old tables until the transaction ends: it waits for those
// that write to them and for the subscribers' batches, then these wait for it,
// and reading goes on. A deadlock with a handler that publishes to the topic it
// consumes is not possible. The role needs UPDATE on both tables, and what a
// publisher needs of the outbox.
//
// Other groups of the topic keep their positions. The outbox's groups all get
// what is moved, so let groups that stand elsewhere catch up first.
//
// Errors are ErrIsolation, ErrUnknownGroup, ErrPayloadType, a *RowError or the
// server's. After the server's the transaction can only be rolled back; the
// others leave it usable, and the locks with it.
func Drain(ctx context.Context, tx *sql.Tx, config DrainConfig) (Drained, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return Drained{}, err
	}
	drained, err := drain(ctx, tx, config)
	if err != nil {
		return Drained{}, fmt.Errorf("watermillsql: drain %s of consumer group %q: %w", config.MessagesTable, config.ConsumerGroup, err)
	}
	return drained, nil
}

func drain(ctx context.Context, tx *sql.Tx, config DrainConfig) (Drained, error) {
	var isolation string
	if err := tx.QueryRowContext(ctx, "SHOW transaction_isolation").Scan(&isolation); err != nil {
		return Drained{}, fmt.Errorf("read the isolation level: %w", err)
	}
	if isolation != "read committed" {
		return Drained{}, fmt.Errorf("%w, is %s", ErrIsolation, isolation)
	}
	// The offsets first: a subscriber holds its row there while its handler may
	// write to the other table.
	for _, lock := range []string{"LOCK TABLE :offsets IN EXCLUSIVE MODE", "LOCK TABLE :messages IN SHARE ROW EXCLUSIVE MODE"} {
		if _, err := tx.ExecContext(ctx, config.text("", lock)); err != nil {
			return Drained{}, fmt.Errorf("lock: %w", err)
		}
	}
	payload, err := payloadExpression(ctx, tx, config)
	if err != nil {
		return Drained{}, err
	}
	// After the locks, so that it covers all that was written before. Once, since
	// it moves while statements follow each other.
	var horizon, after string
	var offset int64
	err = tx.QueryRowContext(ctx, config.text("", drainPosition), config.ConsumerGroup).Scan(&horizon, &after, &offset)
	if errors.Is(err, sql.ErrNoRows) {
		return Drained{}, fmt.Errorf("%w (%s)", ErrUnknownGroup, config.OffsetsTable)
	}
	if err != nil {
		return Drained{}, fmt.Errorf("look for the position: %w", err)
	}

	text := func(statement string) string { return config.text(payload, drainRows+statement) }
	args := []any{config.Topic, config.KeyMetadata, horizon, config.MaxRows, after, offset}
	bad := RowError{Table: config.MessagesTable}
	err = tx.QueryRowContext(ctx, text(drainProblem), append(args, outbox.LimitPayloadBytes)...).Scan(&bad.Offset, &bad.UUID, &bad.Problem)
	if err == nil {
		return Drained{}, &bad
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return Drained{}, fmt.Errorf("look at the rows: %w", err)
	}
	var drained Drained
	if err := tx.QueryRowContext(ctx, text(drainMove), append(args, config.ConsumerGroup)...).Scan(&drained.Moved, &drained.Scheduled); err != nil {
		return Drained{}, fmt.Errorf("move the rows: %w", err)
	}
	if err := tx.QueryRowContext(ctx, config.text(payload, drainMore), config.ConsumerGroup).Scan(&drained.More); err != nil {
		return Drained{}, fmt.Errorf("look for what is left: %w", err)
	}
	return drained, nil
}

// payloadExpression returns the SQL for the payload's bytes, as a subscriber of
// watermill-sql gets them.
func payloadExpression(ctx context.Context, tx *sql.Tx, config DrainConfig) (string, error) {
	var name string
	err := tx.QueryRowContext(ctx, `SELECT t.typname FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
		WHERE a.attrelid = $1::text::regclass AND a.attname = 'payload'`, config.MessagesTable).Scan(&name)
	if err != nil {
		return "", fmt.Errorf("look for the column payload: %w", err)
	}
	switch name {
	case "bytea":
		return "m.payload", nil
	case "json", "jsonb", "text", "varchar":
		return "convert_to(m.payload::text, 'UTF8')", nil
	}
	return "", fmt.Errorf("%w: %s", ErrPayloadType, name)
}

// drainPlaces are what text fills in beside the schema.
var drainPlaces = regexp.MustCompile(`:(messages|offsets|payload|source)\b`)

// text fills in a statement, in one pass, so that no name that was put in is read
// again.
func (c DrainConfig) text(payload, statement string) string {
	values := map[string]string{":messages": c.MessagesTable, ":offsets": c.OffsetsTable, ":payload": payload, ":source": "plain"}
	if c.Envelopes {
		values[":source"] = "unwrapped"
	}
	var filled strings.Builder
	for {
		at := drainPlaces.FindStringIndex(statement)
		if at == nil {
			return filled.String() + schema.Text(c.Schema, statement)
		}
		filled.WriteString(schema.Text(c.Schema, statement[:at[0]]) + values[statement[at[0]:at[1]]])
		statement = statement[at[1]:]
	}
}
