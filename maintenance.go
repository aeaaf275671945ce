package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/millrace/watermill-outbox/internal/upkeep"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// DefaultMaintenanceInterval is the time between two passes of the upkeep.
	DefaultMaintenanceInterval = time.Minute
	// MinMaintenanceInterval is for tests and trials.
	MinMaintenanceInterval = 100 * time.Millisecond
	// DefaultRetention is how long a partition stays after everything in it was
	// delivered, or the partition interval, if that is longer.
	DefaultRetention = upkeep.DefaultRetention
	// DefaultSealDelay is more than a clock may step back.
	DefaultSealDelay = 5 * time.Minute
	// DefaultInboxRetention is how long it is remembered that a message was
	// handled.
	DefaultInboxRetention = 7 * 24 * time.Hour
)

// ErrArchiveNotRead is matched by the problem that is reported when a
// MaintenanceConfig.Archive returned nil before it had read its content to the end.
// The partition stays, and is archived again.
var ErrArchiveNotRead = upkeep.ErrNotRead

// MaintenanceConfig configures the upkeep of an outbox: partitions are made ahead
// of time, emptied and dropped when everybody has what is in them, and what is old
// goes from other tables. The zero value works. How long partitions are, and how
// far ahead they are made, is in the database (see schema.Config). It should be the
// same in all processes: any of them may be the one that does the upkeep.
type MaintenanceConfig struct {
	// Disabled switches the upkeep off in this process. Some process must do it,
	// or a Maintenance: else messages go into the DEFAULT partition, once the
	// look-ahead has passed, and are never removed. Defaults to false.
	Disabled bool

	// Interval is the time between two passes, over all processes. Longer frees
	// space later. At least MinMaintenanceInterval. Defaults to
	// DefaultMaintenanceInterval.
	Interval time.Duration

	// Retention is how long a partition stays after all of it was delivered to all
	// consumer groups, for replays. What was not delivered stays for as long as it
	// takes. At least the partition interval, since whole partitions go. Defaults to
	// DefaultRetention, or the partition interval if that is longer.
	Retention time.Duration

	// SealDelay is how long after the end of its range a partition is declared
	// complete. Messages that come for it later, since a clock was set back by more,
	// are found, and published again. Defaults to DefaultSealDelay.
	SealDelay time.Duration

	// UnreadRetention is how long messages stay of a topic that no group has ever
	// subscribed to, after the end of their partition. They hold back the
	// partition, and with it the messages of all topics. This is the one setting by
	// which messages go that nobody has read. It never applies while there is no
	// consumer group at all. Defaults to 0: for ever.
	UnreadRetention time.Duration

	// InboxRetention is how long it is remembered that a message was handled. A
	// message that is delivered again later is handled again. Negative: for ever.
	// Defaults to DefaultInboxRetention.
	InboxRetention time.Duration

	// DeadLetterRetention is how long dead letters stay, and what is told of those
	// that are gone. Defaults to 0: for ever.
	DeadLetterRetention time.Duration

	// Archive, if not nil, is given the content of each partition before it is
	// emptied: CSV with a header line, as PostgreSQL's COPY writes and reads it,
	// with the columns era, id, xid, topic, key, uuid, metadata, payload, created_at,
	// target_group and attempt. It must read to the end (ErrArchiveNotRead). With an
	// error the partition stays, and is tried again at the next pass. It may be given
	// a partition more than once, as after a crash, or with what came into it after it
	// was emptied (SealedAt tells these apart). Of the DEFAULT partition it is given
	// what is about to be deleted, again and again while messages come there. Meanwhile a
	// transaction is open, and the rest of the upkeep waits. The context ends with the
	// Consumer or Maintenance, or when another process takes over.
	Archive func(ctx context.Context, partition PartitionStatus, content io.Reader) error
}

func (c MaintenanceConfig) withDefaults() MaintenanceConfig {
	c.Interval = cmp.Or(c.Interval, DefaultMaintenanceInterval)
	c.SealDelay = cmp.Or(c.SealDelay, DefaultSealDelay)
	c.InboxRetention = cmp.Or(c.InboxRetention, DefaultInboxRetention)
	return c
}

// validate names the fields as those of a struct called prefix.
func (c MaintenanceConfig) validate(prefix string) error {
	for _, field := range []struct {
		name  string
		value time.Duration
	}{
		{"Retention", c.Retention}, {"SealDelay", c.SealDelay}, {"UnreadRetention", c.UnreadRetention}, {"DeadLetterRetention", c.DeadLetterRetention},
	} {
		if field.value < 0 {
			return fmt.Errorf("outbox: %s.%s must not be negative, is %s", prefix, field.name, field.value)
		}
	}
	if c.Interval < MinMaintenanceInterval {
		return fmt.Errorf("outbox: %s.Interval must be at least %s, is %s", prefix, MinMaintenanceInterval, c.Interval)
	}
	return nil
}

// checkRetention refuses a retention that makes no sense with the partitions.
func (c MaintenanceConfig) checkRetention(ctx context.Context, db schema.Querier, schemaName, prefix string) error {
	if c.Disabled || c.Retention == 0 {
		return nil
	}
	var seconds float64
	err := schema.PgxRow(db)(ctx, schema.Text(schemaName, "SELECT coalesce((SELECT m.value #>> '{}' FROM outbox.meta m WHERE m.key = 'partition_interval'), '0')::float8"), nil, &seconds)
	if err != nil {
		return fmt.Errorf("schema %q: read the partition interval: %w", schemaName, err)
	}
	if interval := time.Duration(seconds * float64(time.Second)); c.Retention < interval {
		return fmt.Errorf("outbox: %s.Retention (%s) must not be shorter than the partition interval of schema %q (%s)", prefix, c.Retention, schemaName, interval)
	}
	return nil
}

// upkeep is the configuration for package upkeep, but for its connections.
func (c MaintenanceConfig) upkeep(schemaName, holder string, timeout time.Duration, logger watermill.LoggerAdapter) upkeep.Config {
	config := upkeep.Config{
		Schema: schemaName, Holder: holder, Interval: c.Interval, Retention: c.Retention, SealDelay: c.SealDelay,
		UnreadRetention: c.UnreadRetention, InboxRetention: max(c.InboxRetention, 0), DeadLetterRetention: c.DeadLetterRetention,
		Timeout: timeout, Logger: logger,
	}
	if archive := c.Archive; archive != nil {
		config.Archive = func(ctx context.Context, p upkeep.Partition, content io.Reader) error {
			return archive(ctx, partitionStatus(p), content)
		}
	}
	return config
}

// Maintenance does the upkeep of an outbox outside of any Consumer: for a process
// of its own, with rights that consumers need not have, or by a clock of the user's.
// Safe for concurrent use.
type Maintenance struct {
	pool   *pgxpool.Pool
	upkeep *upkeep.Upkeep
	schema string
}

// NewMaintenance connects to the database that the pool configuration names, with
// at most two connections of its own, which must lead to the server itself and not
// to a transaction pooler. The role needs what schema.Grants gives for
// upkeep. Disabled is of no concern here. The schema is schema.DefaultName if it is
// "". A nil logger logs nothing. Close it at the end.
func NewMaintenance(db *pgxpool.Config, schemaName string, config MaintenanceConfig, logger watermill.LoggerAdapter) (*Maintenance, error) {
	config = config.withDefaults()
	config.Disabled = false
	if err := config.validate("MaintenanceConfig"); err != nil {
		return nil, err
	}
	schemaName = cmp.Or(schemaName, schema.DefaultName)
	if err := schema.ValidateName(schemaName); err != nil {
		return nil, fmt.Errorf("outbox: NewMaintenance: %w", err)
	}
	if db == nil {
		return nil, errors.New("outbox: NewMaintenance needs a pool configuration, such as pool.Config() or one from pgxpool.ParseConfig")
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	consumer := ConsumerConfig{Mode: ModePoll, MaxConns: 2}
	poolConfig := consumerPool(db, consumer)
	ctx, cancel := context.WithTimeout(context.Background(), constructTimeout)
	defer cancel()
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, fmt.Errorf("outbox: new maintenance: %w", err)
	}
	if err := errors.Join(schema.RequireVersion(ctx, schema.PgxRow(pool), schemaName), config.checkRetention(ctx, pool, schemaName, "MaintenanceConfig")); err != nil {
		pool.Close()
		return nil, fmt.Errorf("outbox: new maintenance: %w", err)
	}
	m := &Maintenance{pool: pool, schema: schemaName}
	internal := config.upkeep(schemaName, uuid.NewString(), DefaultQueryTimeout, logger)
	internal.Open = func() upkeep.Session { return &upkeepSession{&reservedConn{config: poolConfig}} }
	internal.Failed = func(error) {}
	m.upkeep = upkeep.New(pool, internal)
	return m, nil
}

// Run does the upkeep, a pass at each Interval, until the context ends. It returns
// the context's error. What goes wrong is logged, tried again, and in Status.
func (m *Maintenance) Run(ctx context.Context) error {
	m.upkeep.Run(ctx)
	return ctx.Err()
}

// Pass makes one pass now: all that can be done now without making anybody wait.
// If another process is at it, it does nothing. It returns what kept it from going
// on, such as a missing privilege or a connection that broke. Problems of single
// partitions are in Status.
func (m *Maintenance) Pass(ctx context.Context) error {
	if err := m.upkeep.Pass(ctx, true); err != nil {
		return fmt.Errorf("outbox: maintenance: %w", explain(err, m.schema))
	}
	return nil
}

// Status returns how things stood at the last pass. It asks no database.
func (m *Maintenance) Status() MaintenanceStatus { return maintenanceStatus(m.upkeep) }

// Close closes the connections. Run and Pass must have returned.
func (m *Maintenance) Close() error {
	m.pool.Close()
	return nil
}

// upkeepSession is the connection of a pass.
type upkeepSession struct{ *reservedConn }

// CopyTo implements upkeep.Session.
func (s *upkeepSession) CopyTo(ctx context.Context, w io.Writer, sql string) error {
	if s.conn == nil || s.conn.IsClosed() {
		conn, err := s.connectInTime(ctx)
		if err != nil {
			return err
		}
		s.conn = conn
	}
	server := s.conn.PgConn()
	if s.transactions {
		if _, err := server.Exec(ctx, beginText+"; "+transactionSettings).ReadAll(); err != nil {
			return err
		}
	}
	_, err := server.CopyTo(ctx, w, sql)
	if s.transactions {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		_, ended := server.Exec(ctx, commitText).ReadAll() // of one that has failed it is a rollback
		err = errors.Join(err, ended)
	}
	return err
}

// Close implements upkeep.Session.
func (s *upkeepSession) Close() { s.close() }
