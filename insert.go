package outbox

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

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
	// maxStdCallBytes bounds a call through database/sql, where the messages
	// travel as array literals with two characters per payload byte, and
	// PostgreSQL takes no value over 1 GB.
	maxStdCallBytes = 256 << 20
)

var insertColumns = []string{"topic", "key", "uuid", "metadata", "payload"}

// insertText holds the statements for one schema. Every parameter's type is
// written out, so that each of pgx's query modes, and drivers that send text,
// mean the same; the number of parameters does not grow with the messages.
type insertText struct {
	table pgx.Identifier
	one   string
	many  string
}

func newInsertText(schemaName string) insertText {
	return insertText{
		table: pgx.Identifier{schemaName, "messages"},
		one: schema.Text(schemaName, `INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
			VALUES ($1::text, $2::text, $3::text, $4::text::json, $5::bytea)`),
		// unnest returns its rows in the order of the arrays, and the ids are
		// drawn as they pass, so ids follow the order of the call.
		many: schema.Text(schemaName, `INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
			SELECT $1::text, m.key, m.uuid, m.metadata::json, m.payload
			FROM unnest($2::text[], $3::text[], $4::text[], $5::bytea[]) AS m (key, uuid, metadata, payload)`),
	}
}

// insert writes the records in one statement.
func (t insertText) insert(ctx context.Context, db executor, topic string, records []record) error {
	if db.pgx != nil {
		return t.insertPgx(ctx, db.pgx, topic, records)
	}
	return t.insertStd(ctx, db.std, topic, records)
}

func (t insertText) insertPgx(ctx context.Context, db pgxExecutor, topic string, records []record) error {
	if len(records) == 1 {
		r := records[0]
		_, err := db.Exec(ctx, t.one, topic, r.key, r.uuid, r.metadata, r.payload)
		return err
	}
	if len(records) >= copyFrom || totalBytes(records) >= copyFromBytes {
		n, err := db.CopyFrom(ctx, t.table, insertColumns, pgx.CopyFromSlice(len(records), func(i int) ([]any, error) {
			r := records[i]
			return []any{topic, r.key, r.uuid, r.metadata, r.payload}, nil
		}))
		if err == nil && n != int64(len(records)) {
			return fmt.Errorf("COPY stored %d of %d messages", n, len(records))
		}
		return err
	}
	keys := make([]*string, len(records))
	uuids := make([]string, len(records))
	metadata := make([]string, len(records))
	payloads := make([][]byte, len(records))
	for i, r := range records {
		keys[i], uuids[i], metadata[i], payloads[i] = r.key, r.uuid, r.metadata, r.payload
	}
	_, err := db.Exec(ctx, t.many, topic, keys, uuids, metadata, payloads)
	return err
}

func (t insertText) insertStd(ctx context.Context, db stdExecutor, topic string, records []record) error {
	if len(records) == 1 {
		r := records[0]
		var payload any // a nil []byte is not NULL to every driver
		if r.payload != nil {
			payload = r.payload
		}
		_, err := db.ExecContext(ctx, t.one, topic, r.key, r.uuid, r.metadata, payload)
		return err
	}
	if n := totalBytes(records); n > maxStdCallBytes {
		return fmt.Errorf("%w: %d, the limit through database/sql is %d", ErrCallTooLarge, n, maxStdCallBytes)
	}
	// Array literals, because drivers agree on no array type.
	var keys, uuids, metadata, payloads arrayLiteral
	for _, r := range records {
		keys.appendText(r.key)
		uuids.appendText(&r.uuid)
		metadata.appendText(&r.metadata)
		payloads.appendBytes(r.payload)
	}
	_, err := db.ExecContext(ctx, t.many, topic, keys.String(), uuids.String(), metadata.String(), payloads.String())
	return err
}

func totalBytes(records []record) int {
	n := 0
	for _, r := range records {
		n += len(r.payload) + len(r.metadata)
	}
	return n
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
