package replication

import (
	"database/sql/driver"
	"fmt"
	"strconv"
	"strings"
)

// LSN is a position in the write-ahead log of one timeline of one server: the
// number of a byte. LSNs are compared with <, == and >, and mean nothing on
// another server. The zero LSN is no position: the server starts its WAL behind
// it and never sends it.
type LSN uint64

// ParseLSN parses the form in which PostgreSQL writes LSNs, two hexadecimal
// numbers of up to 8 digits with a slash between them, such as 16/B374D848.
func ParseLSN(text string) (LSN, error) {
	high, low, found := strings.Cut(text, "/")
	if !found {
		return 0, fmt.Errorf("replication: %.40q is not an LSN", text)
	}
	h, errHigh := parseHalf(high)
	l, errLow := parseHalf(low)
	if errHigh != nil || errLow != nil {
		return 0, fmt.Errorf("replication: %.40q is not an LSN", text)
	}
	return LSN(h<<32 | l), nil
}

func parseHalf(digits string) (uint64, error) {
	// ParseUint would take leading zeros without end.
	if len(digits) > 8 {
		return 0, strconv.ErrRange
	}
	return strconv.ParseUint(digits, 16, 32)
}

// String returns the LSN as PostgreSQL writes it. The zero LSN is 0/0.
func (l LSN) String() string {
	return fmt.Sprintf("%X/%X", uint64(l)>>32, uint64(l)&0xffffffff)
}

// MarshalText is String.
func (l LSN) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText is ParseLSN.
func (l *LSN) UnmarshalText(text []byte) error {
	parsed, err := ParseLSN(string(text))
	if err != nil {
		return err
	}
	*l = parsed
	return nil
}

// Scan reads a pg_lsn, or its text, out of a query's result. NULL becomes zero.
func (l *LSN) Scan(src any) error {
	switch src := src.(type) {
	case nil:
		*l = 0
		return nil
	case string:
		return l.UnmarshalText([]byte(src))
	case []byte:
		return l.UnmarshalText(src)
	}
	return fmt.Errorf("replication: cannot scan %T into an LSN", src)
}

// Value makes an LSN a parameter of a query. Zero becomes NULL.
func (l LSN) Value() (driver.Value, error) {
	if l == 0 {
		return nil, nil
	}
	return l.String(), nil
}
