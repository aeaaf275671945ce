package outbox

import (
	"time"

	"github.com/millrace/watermill-outbox/internal/upkeep"
)

// PartitionState is where a partition is on its way.
type PartitionState string

const (
	// PartitionOpen: messages come, or may come. Of the DEFAULT partition: nothing
	// in it is to go yet.
	PartitionOpen PartitionState = "open"
	// PartitionWaiting: its time has passed, and transactions are waited for that
	// may still write to it.
	PartitionWaiting PartitionState = "waiting"
	// PartitionSealed: it is complete. Of the DEFAULT partition: what is in it is to
	// go when everybody has it.
	PartitionSealed PartitionState = "sealed"
	// PartitionFreed: it is empty, and about to be dropped.
	PartitionFreed PartitionState = "freed"
	// PartitionDetached: somebody else detached it, and groups go past what is in
	// it. Nothing of it is removed, though it be attached again, until its state is
	// set to open in the table partitions; Problems says what to do.
	PartitionDetached PartitionState = "detached"
)

// MaintenanceStatus says how the upkeep stands, as this process saw it the last
// time.
type MaintenanceStatus struct {
	// Enabled says that this process takes part in the upkeep.
	Enabled bool
	// At is when this process looked last, zero if it has not yet. Ran says that it
	// did the upkeep itself then; otherwise another process was at it, or had just
	// been.
	At  time.Time
	Ran bool
	// Err is what kept it from going on, nil if nothing did.
	Err error
	// Partitions are in the order of their ranges, the DEFAULT one last.
	Partitions []PartitionStatus
	// Problems are what its last pass has found that is not as it should be:
	// each names an object. The rest of the upkeep goes on.
	Problems []error
	// Postponed names what could not be done since locks were not to be had at
	// once, as under a long transaction. It is tried again.
	Postponed []string
}

// PartitionStatus says how a partition stands. Times are the database's.
type PartitionStatus struct {
	Name string
	// Lower and Upper are the range of times whose messages it has: from Lower on,
	// to before Upper. Both are zero for the DEFAULT partition, which has those of
	// times without a partition.
	Lower, Upper time.Time
	State        PartitionState
	// SealedAt is when it was found complete, DeliveredAt when everybody had all of
	// it, ArchivedAt when it was archived, FreedAt when it was emptied; zero if
	// that has not come yet.
	SealedAt, DeliveredAt, ArchivedAt, FreedAt time.Time
	// Writers is how many transactions are waited for in PartitionWaiting.
	Writers int
	// HeldBy says who has not got, or not acknowledged, all of it, since HeldSince;
	// nil if nobody.
	HeldBy    *PartitionHold
	HeldSince time.Time
	// Voided is how many times messages came after it was found complete.
	Voided int
	// Error is why the last step failed, "" if it did not.
	Error string
}

// PartitionHold is who holds a partition back: the first, if there are several.
type PartitionHold struct {
	// ConsumerGroup and Topic are "" where it is not one: a topic that nobody has
	// subscribed to has no group.
	ConsumerGroup string
	Topic         string
	Shard         int
	Reason        string
}

// String returns it for people.
func (h PartitionHold) String() string {
	return upkeep.Hold{Group: h.ConsumerGroup, Topic: h.Topic, Shard: h.Shard, Reason: h.Reason}.String()
}

func maintenanceStatus(u *upkeep.Upkeep) MaintenanceStatus {
	if u == nil {
		return MaintenanceStatus{}
	}
	now := u.Status()
	status := MaintenanceStatus{Enabled: true, At: now.At, Ran: now.Ran, Err: now.Err, Postponed: now.Postponed}
	for _, p := range now.Partitions {
		status.Partitions = append(status.Partitions, partitionStatus(p))
	}
	for _, problem := range now.Problems {
		status.Problems = append(status.Problems, problem)
	}
	return status
}

func partitionStatus(p upkeep.Partition) PartitionStatus {
	status := PartitionStatus{
		Name: p.Name, Lower: p.Lower, Upper: p.Upper, State: PartitionState(p.State), SealedAt: p.SealedAt, DeliveredAt: p.DeliveredAt,
		ArchivedAt: p.ArchivedAt, FreedAt: p.FreedAt, Writers: p.Writers, HeldSince: p.HeldSince, Voided: p.Voided, Error: p.Error,
	}
	if p.Held != nil {
		status.HeldBy = &PartitionHold{ConsumerGroup: p.Held.Group, Topic: p.Held.Topic, Shard: p.Held.Shard, Reason: p.Held.Reason}
	}
	return status
}
