package live

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/replication"
)

// The columns of the log that make a row.
const (
	columnID = iota
	columnXID
	columnEra
	columnTopic
	columnKey
	columnUUID
	columnMetadata
	columnPayload
	columnCreatedAt
	columnTargetGroup
	columnAttempt
	columnCount
)

var columnNames = [columnCount]string{
	"id", "xid", "era", "topic", "key", "uuid", "metadata", "payload", "created_at", "target_group", "attempt",
}

// table knows where in the relation of the log the columns are.
type table struct {
	relation *replication.Relation
	columns  [columnCount]int
}

// newTable finds the columns. Others may be there, of a later version.
func newTable(relation *replication.Relation) (*table, error) {
	t := &table{relation: relation}
	for i, name := range columnNames {
		if t.columns[i] = relation.Column(name); t.columns[i] < 0 {
			return nil, fmt.Errorf("table %q.%q comes without column %s", relation.Schema, relation.Name, name)
		}
	}
	return t, nil
}

// value returns a column of a tuple.
func (t *table) value(tuple replication.Tuple, column int) replication.Value {
	return tuple[t.columns[column]]
}

// row decodes an inserted row; group is whom alone it is for, "" for all. The
// bytes are copied.
func (t *table) row(tuple replication.Tuple) (row window.Row, group string, err error) {
	var created, attempt int64
	for _, column := range []struct {
		number int
		into   *int64
	}{{columnID, &row.ID}, {columnEra, &row.Era}, {columnAttempt, &attempt}} {
		if *column.into, err = integer(t.value(tuple, column.number)); err != nil {
			return window.Row{}, "", fmt.Errorf("column %s: %w", columnNames[column.number], err)
		}
	}
	xid, err := integer(t.value(tuple, columnXID))
	if err != nil {
		return window.Row{}, "", fmt.Errorf("column xid: %w", err)
	}
	if created, err = microseconds(t.value(tuple, columnCreatedAt)); err != nil {
		return window.Row{}, "", fmt.Errorf("column created_at: %w", err)
	}
	row.XID = uint64(xid) //nolint:gosec // transaction ids have 64 bits
	row.Attempt = int(attempt)
	row.CreatedAt = time.UnixMicro(created)

	key, uuid := t.value(tuple, columnKey).Data, t.value(tuple, columnUUID).Data
	metadata, payload := t.value(tuple, columnMetadata).Data, t.value(tuple, columnPayload)
	if row.Key, row.UUID = string(key), string(uuid); payload.Kind == replication.Text {
		return window.Row{}, "", fmt.Errorf("column payload comes as text")
	}
	content := make([]byte, len(metadata)+len(payload.Data))
	copy(content, metadata)
	copy(content[len(metadata):], payload.Data)
	row.Metadata = content[:len(metadata):len(metadata)]
	if !payload.IsNull() {
		row.Payload = content[len(metadata):]
	}
	return row, string(t.value(tuple, columnTargetGroup).Data), nil
}

// pgEpoch is where PostgreSQL's binary times begin, in microseconds.
var pgEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

func microseconds(value replication.Value) (int64, error) {
	if value.Kind != replication.Binary {
		return 0, fmt.Errorf("a time comes as %q", byte(value.Kind))
	}
	n, err := integer(value)
	return pgEpoch + n, err
}

// integer reads a number in either format.
func integer(value replication.Value) (int64, error) {
	switch {
	case value.Kind == replication.Text:
		return strconv.ParseInt(string(value.Data), 10, 64)
	case value.Kind == replication.Binary && len(value.Data) == 4:
		return int64(int32(binary.BigEndian.Uint32(value.Data))), nil //nolint:gosec // two's complement
	case value.Kind == replication.Binary && len(value.Data) == 8:
		return int64(binary.BigEndian.Uint64(value.Data)), nil //nolint:gosec // two's complement
	}
	return 0, fmt.Errorf("a number comes as %q of %d bytes", byte(value.Kind), len(value.Data))
}
