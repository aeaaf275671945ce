package window

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/millrace/watermill-outbox/internal/metadata"
)

// Row is one message as it is stored.
type Row struct {
	Era       int64
	ID        int64
	Topic     string
	Key       string // "" if none
	UUID      string
	Metadata  []byte // JSON, as stored
	Payload   []byte // nil if NULL
	CreatedAt time.Time
	Attempt   int
	// XID is the transaction that wrote the row, of rows from the write-ahead
	// log alone.
	XID uint64

	step Step
}

// DecodeMetadata returns the metadata as a map of its own at each call, since
// handlers change theirs. An error says that the row cannot become a message:
// it was written around the library.
func (r Row) DecodeMetadata() (map[string]string, error) { return metadata.Decode(r.Metadata) }

// pageKind says which columns follow on the common ones.
type pageKind int

const (
	plainPage pageKind = iota
	openPage
	pastPage
)

// line is one row of an answer, the header included.
type line struct {
	row Row
	// kind is 0 for the header, else the step of the row.
	kind int
	// total is the size of the page up to and with this row.
	total int64
	// voids, in the header, is what :spare says, -1 where nothing is left out.
	voids int64
	life  Life
	// Of open.sql alone.
	snapshot string
	top      int64
	lateXids []string
	// Of past.sql alone: how many rows were looked at, and the last of them.
	scanned               int64
	scannedEra, scannedID int64
}

// pgEpoch is where PostgreSQL's binary times begin.
var pgEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

// scan reads the current line. The answer's columns are those of the queries:
// step, id, key, uuid, metadata, payload, created_at, attempt, total, era, life,
// topic (of many topics alone), and then those of its kind.
func scan(rows pgx.Rows, kind pageKind) (line, error) {
	for _, field := range rows.FieldDescriptions() {
		// Text and json come as text, which is the same in either format.
		if field.Format != pgx.BinaryFormatCode && field.DataTypeOID != pgtype.TextOID && field.DataTypeOID != pgtype.JSONOID {
			return scanText(rows, kind)
		}
	}
	values := rows.RawValues()
	step, err := integer(values[0])
	if err != nil {
		return line{}, err
	}
	if step == 0 {
		return scanText(rows, kind) // one row of a page: need not be quick
	}
	// A page's rows, straight from the connection's buffer, in two or three
	// allocations: scanning through pointers took a third of a page's time.
	l := line{kind: int(step)}
	metadata, payload := values[4], values[5]
	content := make([]byte, len(metadata)+len(payload))
	copy(content, metadata)
	copy(content[len(metadata):], payload)
	l.row = Row{
		Key: string(values[2]), UUID: string(values[3]), Metadata: content[:len(metadata):len(metadata)],
		step: steps[int(step)],
	}
	if payload != nil {
		l.row.Payload = content[len(metadata):]
	}
	var created, attempt int64
	for _, column := range []struct {
		value []byte
		into  *int64
	}{{values[1], &l.row.ID}, {values[6], &created}, {values[7], &attempt}, {values[8], &l.total}} {
		if *column.into, err = integer(column.value); err != nil {
			return line{}, err
		}
	}
	l.row.CreatedAt = time.UnixMicro(pgEpoch + created)
	l.row.Attempt = int(attempt)
	if values[9] != nil {
		if l.row.Era, err = integer(values[9]); err != nil {
			return line{}, err
		}
	}
	if values[11] != nil {
		l.row.Topic = string(values[11])
	}
	return l, nil
}

// integer reads a binary integer of any width.
func integer(value []byte) (int64, error) {
	switch len(value) {
	case 2:
		return int64(int16(binary.BigEndian.Uint16(value))), nil //nolint:gosec // two's complement
	case 4:
		return int64(int32(binary.BigEndian.Uint32(value))), nil //nolint:gosec // two's complement
	case 8:
		return int64(binary.BigEndian.Uint64(value)), nil //nolint:gosec // two's complement
	}
	return 0, fmt.Errorf("an integer of %d bytes in a page", len(value))
}

// scanText reads any line in any format, as when the connection uses the simple
// protocol.
func scanText(rows pgx.Rows, kind pageKind) (line, error) {
	var (
		l                       line
		id, era, total, top     *int64
		count, lastEra, lastID  *int64
		key, uuid, boot, window *string
		topic                   *string
		createdAt               *time.Time
		attempt                 *int
	)
	dest := []any{&l.kind, &id, &key, &uuid, &l.row.Metadata, &l.row.Payload, &createdAt, &attempt, &total, &era, &boot, &topic}
	switch kind {
	case openPage:
		dest = append(dest, &window, &top, &l.lateXids)
	case pastPage:
		dest = append(dest, &count, &lastEra, &lastID)
	case plainPage:
	}
	if err := rows.Scan(dest...); err != nil {
		return line{}, err
	}
	if l.kind == 0 {
		if era == nil || (kind == openPage && (window == nil || top == nil)) || (kind == pastPage && count == nil) {
			return line{}, errors.New("a page's header is incomplete")
		}
		l.life.Era = *era
		if l.voids = -1; total != nil {
			l.voids = *total
		}
		if boot != nil {
			l.life.Boot = *boot
		}
		switch {
		case kind == openPage:
			l.snapshot, l.top = *window, *top
			if l.lateXids == nil {
				l.lateXids = []string{}
			}
		case kind == pastPage && *count > 0:
			l.scanned, l.scannedEra, l.scannedID = *count, *lastEra, *lastID
		}
		return l, nil
	}
	if id == nil || uuid == nil || createdAt == nil || attempt == nil || total == nil {
		return line{}, errors.New("a page's row is incomplete")
	}
	l.row.ID, l.row.UUID, l.row.CreatedAt, l.row.Attempt, l.total = *id, *uuid, *createdAt, *attempt, *total
	l.row.step = steps[l.kind]
	if key != nil {
		l.row.Key = *key
	}
	if era != nil {
		l.row.Era = *era
	}
	if topic != nil {
		l.row.Topic = *topic
	}
	return l, nil
}
