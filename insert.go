package outbox

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/millrace/watermill-outbox/internal/record"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// copyFrom is how many messages of one call make COPY pay: it costs more
	// than an INSERT to begin with, and less per row. Measured: go run ./bench
	// copy.
	copyFrom = 128
	// copyFromBytes is how many bytes of one call do: an array is built in
	// memory on both sides, COPY streams.
	copyFromBytes = 256 << 10
	// maxArrayBytes bounds a call whose messages travel as arrays.
	maxArrayBytes = record.MaxCallBytes
)

var insertColumns = []string{"topic", "key", "uuid", "metadata", "payload"}

// insertText holds the statements for one schema. Every parameter's type is
// written out, so that each of pgx's query modes, and drivers that send text,
// mean the same; the number of parameters does not grow with the messages.
type insertText struct {
	table pgx.Identifier
	one   string
	many  string
	// due is for calls with messages that may have to wait.
	due string
}

func newInsertText(schemaName string) insertText {
	return insertText{
		table: pgx.Identifier{schemaName, "messages"},
		one: schema.Text(schemaName, `INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
			VALUES ($1::text, $2::text, $3::text, $4::text::json, $5::bytea)`),
		// unnest returns its rows in the order of the arrays, and the ids are
		// drawn as they pass, so ids follow the order of the call. Each has its
		// topic, since what is unwrapped may be for several.
		many: schema.Text(schemaName, `INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
			SELECT m.topic, m.key, m.uuid, m.metadata::json, m.payload
			FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[]) AS m (topic, key, uuid, metadata, payload)`),
		// One statement for both tables, because a call without a transaction is
		// all or nothing, too. Which of them a message goes to is asked once for
		// each, of the server's clock: by a client's that runs ahead it would be
		// early, and asked twice it might go to both or to neither.
		due: schema.Text(schemaName, `WITH call AS MATERIALIZED (
				SELECT m.n, m.topic, m.key, m.uuid, m.metadata::json AS metadata, m.payload, m.due_at::timestamptz AS due_at,
				       coalesce(m.due_at::timestamptz OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp(), false) AS waits
				FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[])
					WITH ORDINALITY AS m (topic, key, uuid, metadata, payload, due_at, n)
			), waiting AS (
				INSERT INTO outbox.deferred (due_at, topic, key, uuid, metadata, payload)
				SELECT c.due_at, c.topic, c.key, c.uuid, c.metadata, c.payload FROM call c WHERE c.waits ORDER BY c.n
			)
			INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
			SELECT c.topic, c.key, c.uuid, c.metadata, c.payload FROM call c WHERE NOT c.waits ORDER BY c.n`),
	}
}

// insert writes the records in one statement.
func (t insertText) insert(ctx context.Context, db executor, records []record.Record) error {
	if db.pgx != nil {
		return t.insertPgx(ctx, db.pgx, records)
	}
	return t.insertStd(ctx, db.std, records)
}

func (t insertText) insertPgx(ctx context.Context, db pgxExecutor, records []record.Record) error {
	scheduled := anyDue(records)
	if len(records) == 1 && !scheduled {
		r := records[0]
		_, err := db.Exec(ctx, t.one, r.Topic, r.Key, r.UUID, r.Metadata, r.Payload)
		return err
	}
	if scheduled {
		if err := checkArrayBytes(records); err != nil {
			return err
		}
	} else if len(records) >= copyFrom || record.Bytes(records) >= copyFromBytes {
		n, err := db.CopyFrom(ctx, t.table, insertColumns, pgx.CopyFromSlice(len(records), func(i int) ([]any, error) {
			r := records[i]
			return []any{r.Topic, r.Key, r.UUID, r.Metadata, r.Payload}, nil
		}))
		if err == nil && n != int64(len(records)) {
			return fmt.Errorf("COPY stored %d of %d messages", n, len(records))
		}
		return err
	}
	topics := make([]string, len(records))
	keys := make([]*string, len(records))
	uuids := make([]string, len(records))
	metadata := make([]string, len(records))
	payloads := make([][]byte, len(records))
	dues := make([]*string, len(records))
	for i, r := range records {
		topics[i], keys[i], uuids[i], metadata[i], payloads[i], dues[i] = r.Topic, r.Key, r.UUID, r.Metadata, r.Payload, r.Due
	}
	if scheduled {
		_, err := db.Exec(ctx, t.due, topics, keys, uuids, metadata, payloads, dues)
		return err
	}
	_, err := db.Exec(ctx, t.many, topics, keys, uuids, metadata, payloads)
	return err
}

func (t insertText) insertStd(ctx context.Context, db stdExecutor, records []record.Record) error {
	scheduled := anyDue(records)
	if len(records) == 1 && !scheduled {
		r := records[0]
		var payload any // a nil []byte is not NULL to every driver
		if r.Payload != nil {
			payload = r.Payload
		}
		_, err := db.ExecContext(ctx, t.one, r.Topic, r.Key, r.UUID, r.Metadata, payload)
		return err
	}
	if err := checkArrayBytes(records); err != nil {
		return err
	}
	// Array literals, because drivers agree on no array type.
	var topics, keys, uuids, metadata, payloads, dues arrayLiteral
	for _, r := range records {
		topics.appendText(&r.Topic)
		keys.appendText(r.Key)
		uuids.appendText(&r.UUID)
		metadata.appendText(&r.Metadata)
		payloads.appendBytes(r.Payload)
		dues.appendText(r.Due)
	}
	if scheduled {
		_, err := db.ExecContext(ctx, t.due, topics.String(), keys.String(), uuids.String(), metadata.String(), payloads.String(), dues.String())
		return err
	}
	_, err := db.ExecContext(ctx, t.many, topics.String(), keys.String(), uuids.String(), metadata.String(), payloads.String())
	return err
}

// anyDue reports whether a message may have to wait.
func anyDue(records []record.Record) bool {
	return slices.ContainsFunc(records, func(r record.Record) bool { return r.Due != nil })
}

// checkArrayBytes refuses what arrays cannot carry. One message always fits.
func checkArrayBytes(records []record.Record) error {
	if n := record.Bytes(records); n > maxArrayBytes && len(records) > 1 {
		return fmt.Errorf("%w: %d, the limit of a call through database/sql, or with scheduled messages, is %d", ErrCallTooLarge, n, maxArrayBytes)
	}
	return nil
}

// arrayLiteral builds the text form of a PostgreSQL array.
type arrayLiteral struct{ b strings.Builder }

var escapeElement = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

func (a *arrayLiteral) next() {
	if a.b.Len() == 0 {
		a.b.WriteByte('{')
	} else {
		a.b.WriteByte(',')
	}
}

func (a *arrayLiteral) appendText(s *string) {
	a.next()
	if s == nil {
		a.b.WriteString("NULL")
		return
	}
	a.b.WriteByte('"')
	_, _ = escapeElement.WriteString(&a.b, *s)
	a.b.WriteByte('"')
}

func (a *arrayLiteral) appendBytes(p []byte) {
	a.next()
	if p == nil {
		a.b.WriteString("NULL")
		return
	}
	a.b.WriteString(`"\\x`)
	_, _ = hex.NewEncoder(&a.b).Write(p)
	a.b.WriteByte('"')
}

func (a *arrayLiteral) String() string {
	if a.b.Len() == 0 {
		return "{}"
	}
	return a.b.String() + "}"
}
