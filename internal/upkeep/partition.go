package upkeep

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// State is where a partition is on its way.
type State string

// The states; see the package documentation.
const (
	Open     State = "open"
	Waiting  State = "waiting"
	Sealed   State = "sealed"
	Freed    State = "freed"
	Detached State = "detached"
)

// Partition is what is known of one.
type Partition struct {
	Name string
	// Lower and Upper are its range; zero for the DEFAULT partition.
	Lower, Upper time.Time
	State        State
	// Voided counts the seals that a row came after.
	Voided int
	// Writers is how many transactions are waited for.
	Writers int
	// SealedAt and the others are when it came that far, by the database's clock;
	// zero if it did not.
	SealedAt, DeliveredAt, ArchivedAt, FreedAt time.Time
	// Held says who has not got all of it, since HeldSince; nil if nobody.
	Held      *Hold
	HeldSince time.Time
	// Error is why the last step failed, "" if it did not.
	Error string

	seal string
	// due: it is time for the seal.
	due bool
}

// Default reports whether it is the DEFAULT partition.
func (p Partition) Default() bool { return p.Lower.IsZero() && p.Upper.IsZero() }

// Hold is who holds a partition back.
type Hold struct {
	Group  string `json:"group"`
	Topic  string `json:"topic"`
	Shard  int    `json:"shard"`
	Reason string `json:"reason"`
}

// String returns it for logs and errors.
func (h Hold) String() string {
	switch {
	case h.Topic == "":
		return h.Reason
	case h.Group == "":
		return fmt.Sprintf("topic %q: %s", h.Topic, h.Reason)
	}
	return fmt.Sprintf("group %q, topic %q, shard %d: %s", h.Group, h.Topic, h.Shard, h.Reason)
}

func scanPartition(row pgx.CollectableRow) (Partition, error) {
	var (
		p                                                         Partition
		lower, upper, sealed, delivered, archived, freed, heldFor *time.Time
		seal, held, failure                                       *string
	)
	if err := row.Scan(&p.Name, &lower, &upper, &p.State, &p.Voided, &p.Writers, &seal, &sealed, &delivered, &archived, &freed,
		&held, &heldFor, &failure, &p.due); err != nil {
		return Partition{}, err
	}
	for from, to := range map[*time.Time]*time.Time{
		lower: &p.Lower, upper: &p.Upper, sealed: &p.SealedAt, delivered: &p.DeliveredAt, archived: &p.ArchivedAt, freed: &p.FreedAt, heldFor: &p.HeldSince,
	} {
		if from != nil {
			*to = *from
		}
	}
	if seal != nil {
		p.seal = *seal
	}
	if failure != nil {
		p.Error = *failure
	}
	hold, err := parseHold(held)
	p.Held = hold
	return p, err
}

// parseHold reads what upkeep_holder returns.
func parseHold(text *string) (*Hold, error) {
	if text == nil {
		return nil, nil //nolint:nilnil // nobody holds it
	}
	var stored struct {
		Group, Topic, Reason *string
		Shard                *int
	}
	if err := json.Unmarshal([]byte(*text), &stored); err != nil {
		return nil, fmt.Errorf("read what holds a partition back: %w", err)
	}
	var h Hold
	for from, to := range map[*string]*string{stored.Group: &h.Group, stored.Topic: &h.Topic, stored.Reason: &h.Reason} {
		if from != nil {
			*to = *from
		}
	}
	if stored.Shard != nil {
		h.Shard = *stored.Shard
	}
	return &h, nil
}
