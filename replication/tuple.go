package replication

// Tuple is a row, a value for each column of its relation, in their order.
type Tuple []Value

// Value is one column of a row.
type Value struct {
	Kind ValueKind
	// Data is the value, in the format that Kind says; nil for Null and
	// Unchanged.
	Data []byte
}

// ValueKind says how a value was sent.
type ValueKind byte

const (
	// Null is SQL's NULL.
	Null ValueKind = 'n'
	// Unchanged is a large value, stored out of line, that an update has not
	// changed. It was not sent.
	Unchanged ValueKind = 'u'
	// Text is a value in text format.
	Text ValueKind = 't'
	// Binary is a value in binary format. Types that have none are sent as
	// text, whatever was asked for.
	Binary ValueKind = 'b'
)

// IsNull reports whether the value is SQL's NULL.
func (v Value) IsNull() bool { return v.Kind == Null }

// IsUnchanged reports whether the value was not sent, since an update has not
// changed it.
func (v Value) IsUnchanged() bool { return v.Kind == Unchanged }

// FormatCode returns the value's format as pgx numbers them: 0 for text and 1
// for binary. With it, the column's TypeOID and Data, pgtype.Map scans a value.
func (v Value) FormatCode() int16 {
	if v.Kind == Binary {
		return 1
	}
	return 0
}

// Clone returns a copy that shares no bytes with t.
func (t Tuple) Clone() Tuple {
	if t == nil {
		return nil
	}
	size := 0
	for _, value := range t {
		size += len(value.Data)
	}
	data := make([]byte, 0, size)
	copied := make(Tuple, len(t))
	for i, value := range t {
		copied[i].Kind = value.Kind
		if value.Data == nil {
			continue
		}
		start := len(data)
		data = append(data, value.Data...)
		// Full capacity would let an append run into the next value.
		copied[i].Data = data[start:len(data):len(data)]
	}
	return copied
}
