package schema

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	// DefaultName is the schema the tables live in when none is named.
	DefaultName = "outbox"

	// DefaultPartitionInterval is the range of created_at a partition holds.
	DefaultPartitionInterval = time.Hour
	// MinPartitionInterval is for tests and trials. With a retention of hours,
	// less than some minutes makes more partitions than is reasonable: each one
	// costs every statement on the log a little planning.
	MinPartitionInterval = time.Second
	// MaxPartitionInterval keeps retention useful: space comes back only
	// when a whole partition goes.
	MaxPartitionInterval = 31 * 24 * time.Hour

	// DefaultLookAhead is how far ahead of now partitions are created.
	DefaultLookAhead = 12 * time.Hour
	// maxPartitionsAhead bounds LookAhead / PartitionInterval.
	maxPartitionsAhead = 1000

	// maxIdentifierBytes is PostgreSQL's NAMEDATALEN - 1; longer names are cut
	// by the server with no more than a notice.
	maxIdentifierBytes = 63
)

// Config says where the outbox lives and how its log is partitioned. The zero
// value is the default outbox.
type Config struct {
	// Name is the schema the tables live in: any valid identifier of at most
	// 63 bytes, case kept. Several outboxes may live in one database under
	// different names. Defaults to DefaultName.
	Name string

	// PartitionInterval is the range of created_at one partition of the log
	// holds, in whole seconds. Shorter frees space sooner and makes more
	// partitions, each of which costs every read a little; longer does the
	// opposite. Used when the tables are created; later changes are read from
	// the database. Defaults to DefaultPartitionInterval.
	PartitionInterval time.Duration

	// LookAhead is how far ahead of now partitions exist, in whole seconds. A
	// message that finds no partition goes into the DEFAULT one, so too short
	// a value loses nothing but costs upkeep, which makes those of the next three
	// intervals at least. The first that is made begins one to two intervals from
	// now. Defaults to DefaultLookAhead.
	LookAhead time.Duration
}

// WithDefaults returns the configuration with its zero values filled in.
func (c Config) WithDefaults() Config {
	c.Name = cmp.Or(c.Name, DefaultName)
	c.PartitionInterval = cmp.Or(c.PartitionInterval, DefaultPartitionInterval)
	c.LookAhead = cmp.Or(c.LookAhead, DefaultLookAhead)
	return c
}

// Validate reports the first field that cannot be used, after defaults.
func (c Config) Validate() error {
	if err := ValidateName(c.Name); err != nil {
		return err
	}
	if c.PartitionInterval < MinPartitionInterval || c.PartitionInterval > MaxPartitionInterval {
		return fmt.Errorf("schema: PartitionInterval must be between %s and %s, is %s",
			MinPartitionInterval, MaxPartitionInterval, c.PartitionInterval)
	}
	if c.PartitionInterval%time.Second != 0 {
		return fmt.Errorf("schema: PartitionInterval must be whole seconds, is %s", c.PartitionInterval)
	}
	if c.LookAhead < 0 || c.LookAhead%time.Second != 0 {
		return fmt.Errorf("schema: LookAhead must be whole seconds and not negative, is %s", c.LookAhead)
	}
	if c.LookAhead/c.PartitionInterval > maxPartitionsAhead {
		return fmt.Errorf("schema: LookAhead (%s) must be at most %d times PartitionInterval (%s)",
			c.LookAhead, maxPartitionsAhead, c.PartitionInterval)
	}
	return nil
}

// ValidateName reports whether name can be the name of a schema: not empty,
// valid UTF-8 without NUL, at most 63 bytes (the server would cut a longer one
// and two outboxes could end up in one schema), and not of the system's own.
func ValidateName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("schema: the schema's name is empty")
	case len(name) > maxIdentifierBytes:
		return fmt.Errorf("schema: the schema's name %q has %d bytes, PostgreSQL keeps only %d: choose a shorter one",
			name, len(name), maxIdentifierBytes)
	case !utf8.ValidString(name) || strings.ContainsRune(name, 0):
		return fmt.Errorf("schema: the schema's name %q is not valid UTF-8 without NUL", name)
	case strings.HasPrefix(name, "pg_") || name == "information_schema":
		return fmt.Errorf("schema: the schema's name %q is reserved by PostgreSQL", name)
	}
	return nil
}
