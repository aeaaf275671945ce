package replication

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
)

// SlotOptions say what kind of slot to create.
type SlotOptions struct {
	// Temporary makes a slot that vanishes with the connection, however that
	// ends. Only the connection that made it can stream from it.
	Temporary bool

	// Failover makes a durable slot that is kept in step on physical standbys,
	// so that it is there after a promotion; PostgreSQL 17 and later, see
	// sync_replication_slots.
	Failover bool
}

// CreatedSlot is a new slot.
type CreatedSlot struct {
	Name string
	// ConsistentPoint is where its stream begins: transactions that commit
	// behind it are sent, whole. What committed before is in the tables.
	ConsistentPoint LSN
}

// slotName is what PostgreSQL takes.
var slotName = regexp.MustCompile(`^[a-z0-9_]{1,63}$`)

// CheckSlotName returns an ErrInvalidName for a name that no slot can have: one
// that is not 1 to 63 of the characters a-z, 0-9 and _.
func CheckSlotName(name string) error {
	if slotName.MatchString(name) {
		return nil
	}
	return fmt.Errorf("%w: slot %.80q (1 to 63 of a-z, 0-9, _)", ErrInvalidName, name)
}

// quoteSlot writes a valid name as the replication grammar takes any of them,
// words of its own such as temporary included, and 1.
func quoteSlot(name string) string { return `"` + name + `"` }

// CreateSlot creates a slot for the plugin pgoutput. No snapshot is exported.
//
// It waits for all transactions that were running when it began, and meanwhile
// keeps WAL from being removed. A lock_timeout in the session's settings bounds
// each wait for one of them (ErrLockTimeout); so does ctx, but it is no help
// against the end of this process, after which the server would go on waiting.
// After an error no slot is left, with one exception: when ctx ends at the
// moment of success, a durable slot may be.
func (c *Conn) CreateSlot(ctx context.Context, name string, options SlotOptions) (CreatedSlot, error) {
	const op = "create slot"
	if c.taken {
		return CreatedSlot{}, ErrConnTaken
	}
	if err := CheckSlotName(name); err != nil {
		return CreatedSlot{}, err
	}
	sql, err := createSlotCommand(name, options, c.ServerVersion())
	if err != nil {
		return CreatedSlot{}, err
	}
	result, err := pglogrepl.ParseCreateReplicationSlot(c.pg.Exec(ctx, sql))
	if err != nil {
		return CreatedSlot{}, c.explain(ctx, op, name, err)
	}
	point, err := ParseLSN(result.ConsistentPoint)
	if err != nil {
		return CreatedSlot{}, &Error{Op: op, Name: name, Reason: ErrProtocol, Err: err}
	}
	return CreatedSlot{Name: result.SlotName, ConsistentPoint: point}, nil
}

// createSlotCommand writes the command in the oldest form that can express it.
func createSlotCommand(name string, options SlotOptions, version int) (string, error) {
	var b strings.Builder
	b.WriteString("CREATE_REPLICATION_SLOT " + quoteSlot(name))
	if options.Temporary {
		b.WriteString(" TEMPORARY")
	}
	b.WriteString(" LOGICAL pgoutput ")
	if !options.Failover {
		b.WriteString("NOEXPORT_SNAPSHOT")
		return b.String(), nil
	}
	if options.Temporary {
		return "", errors.New("replication: a temporary slot cannot be a failover slot")
	}
	if version < 17 {
		return "", fmt.Errorf("%w: failover slots need PostgreSQL 17, the server is %d", ErrUnsupported, version)
	}
	b.WriteString("(SNAPSHOT 'nothing', FAILOVER true)")
	return b.String(), nil
}

// DropSlot drops a slot. It returns ErrSlotInUse while another connection
// streams from it, or with wait waits for that to end, bounded by ctx only.
func (c *Conn) DropSlot(ctx context.Context, name string, wait bool) error {
	if c.taken {
		return ErrConnTaken
	}
	if err := CheckSlotName(name); err != nil {
		return err
	}
	err := pglogrepl.DropReplicationSlot(ctx, c.pg, quoteSlot(name), pglogrepl.DropReplicationSlotOptions{Wait: wait})
	if err != nil {
		return c.explain(ctx, "drop slot", name, err)
	}
	return nil
}

// explain is wrap for errors about a slot. Where the SQLSTATE alone does not
// tell, it asks the server, since messages are in the server's language.
func (c *Conn) explain(ctx context.Context, op, name string, err error) error {
	wrapped := wrap(op, name, aboutSlot, err)
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != statePrerequisite || c.pg.IsClosed() {
		return wrapped
	}
	if level, settingErr := c.Setting(ctx, "wal_level"); settingErr == nil && level != "logical" {
		return &Error{Op: op, Name: name, Reason: ErrWALLevel, Err: fmt.Errorf("wal_level is %s: %w", level, err)}
	}
	rows, queryErr := c.query(ctx, "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE wal_status = 'lost' AND slot_name = "+quoteLiteral(name))
	if queryErr == nil && len(rows) > 0 {
		return &Error{Op: op, Name: name, Reason: ErrSlotLost, Err: err}
	}
	return wrapped
}
