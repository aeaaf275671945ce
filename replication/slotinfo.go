package replication

import (
	"context"
	_ "embed"

	"github.com/jackc/pgx/v5"
)

// querier is an ordinary connection, a transaction or a pool of pgx.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// SlotInfo is a logical slot as the server describes it.
type SlotInfo struct {
	Name     string
	Plugin   string
	Database string
	// Temporary slots belong to the session that made them.
	Temporary bool
	// ActivePID is the process that streams from it, or 0.
	ActivePID int32
	// RestartLSN is from where on WAL is kept for it. Zero for a lost slot.
	RestartLSN LSN
	// ConfirmedFlushLSN is up to where its consumer has confirmed.
	ConfirmedFlushLSN LSN
	// WALStatus is reserved or extended while its WAL is there, unreserved when
	// it may go at the next checkpoint, and lost when it has gone.
	WALStatus string
	// RetainedBytes is how much WAL the server keeps for it.
	RetainedBytes int64
	// SafeBytes is how much more WAL may be written before it is in danger of
	// being lost, or -1 if it never is (max_slot_wal_keep_size).
	SafeBytes int64
	// Failover slots are kept in step on standbys; PostgreSQL 17 and later.
	Failover bool
	// InvalidationReason says why it was lost; PostgreSQL 17 and later.
	InvalidationReason string
}

// IsLost reports whether nothing can be streamed from the slot any more.
func (s SlotInfo) IsLost() bool { return s.WALStatus == "lost" || s.InvalidationReason != "" }

//go:embed queries/slots.sql
var slotsQuery string

// ListSlots returns all logical slots of the server, those of other databases
// included, by name. It goes over an ordinary connection and takes no special
// privilege.
func ListSlots(ctx context.Context, db querier) ([]SlotInfo, error) {
	return slots(ctx, db, nil)
}

// InspectSlot returns one slot, or ErrSlotMissing.
func InspectSlot(ctx context.Context, db querier, name string) (SlotInfo, error) {
	found, err := slots(ctx, db, &name)
	if err != nil {
		return SlotInfo{}, err
	}
	if len(found) == 0 {
		return SlotInfo{}, &Error{Op: "inspect slot", Name: name, Reason: ErrSlotMissing}
	}
	return found[0], nil
}

func slots(ctx context.Context, db querier, name *string) ([]SlotInfo, error) {
	rows, err := db.Query(ctx, slotsQuery, name)
	if err != nil {
		return nil, wrap("list slots", "", aboutConnection, err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (SlotInfo, error) {
		var s SlotInfo
		err := row.Scan(&s.Name, &s.Plugin, &s.Database, &s.Temporary, &s.ActivePID, &s.RestartLSN, &s.ConfirmedFlushLSN,
			&s.WALStatus, &s.RetainedBytes, &s.SafeBytes, &s.Failover, &s.InvalidationReason)
		return s, err
	})
	if err != nil {
		return nil, wrap("list slots", "", aboutConnection, err)
	}
	return found, nil
}
