package window

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Seal is what a partition was sealed with: a snapshot that sees all there is in it.
type Seal struct {
	// Upper is where the partition ends.
	Upper time.Time
	// Era is the cluster the snapshot belongs to.
	Era      int64
	Snapshot Snapshot
}

// Seals are the sealed partitions, the oldest first, up to the first that is not.
// They let readers leave out what they have read: a P that covers a seal has all of
// the partition, and whatever slips into it later is published again, until the seal
// is void. So what is known here may be old; see Bound. Safe for concurrent use; of nil
// nothing is sealed.
type Seals struct {
	mu    sync.Mutex
	life  Life
	voids int64
	list  []Seal
}

// Bound is the moment before which somebody has everything, by created_at. It holds
// in the life of the server in which the seals were read, while none has been void
// since, and while nothing is in the DEFAULT partition, where rows of any time may be.
// The zero value is none.
type Bound struct {
	Since time.Time
	life  Life
	voids int64
}

// Holds reports whether a statement that leaves out what the bound says was right to
// do so: in which life of the server it was answered, and how many times seals had
// been void (-1: there was something in the DEFAULT partition).
func (b Bound) Holds(life Life, voids int64) bool {
	return b.Since.IsZero() || life == b.life && voids == b.voids
}

// Of returns the bound of who has seen all that a snapshot of an era sees.
func (s *Seals) Of(era int64, seen Snapshot) (bound Bound) {
	if s == nil {
		return Bound{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, seal := range s.list {
		if seal.Era != era || !seen.Covers(seal.Snapshot) {
			break
		}
		bound = Bound{Since: seal.Upper, life: s.life, voids: s.voids}
	}
	return bound
}

// Forget makes nothing be sealed until the next Refresh.
func (s *Seals) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = nil
}

// Refresh asks what is sealed. While there is anything in the DEFAULT partition, or
// a partition that upkeep does not know, nothing is.
func (s *Seals) Refresh(ctx context.Context, queries *Queries, db Querier) error {
	rows, err := db.Query(ctx, queries.seals)
	if err != nil {
		return err
	}
	var life Life
	var voids int64
	var list []Seal
	sealed := true
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
		var known bool
		var upper *time.Time
		var boot, text *string
		var era *int64
		if err := row.Scan(&life.Era, &boot, &known, &upper, &text, &era, &voids); err != nil {
			return struct{}{}, err
		}
		if boot != nil {
			life.Boot = *boot
		}
		if !known || voids < 0 {
			list, sealed = nil, false
		}
		if sealed = sealed && text != nil; !sealed {
			return struct{}{}, nil
		}
		snapshot, err := ParseSnapshot(*text)
		list = append(list, Seal{Upper: upper.UTC(), Era: *era, Snapshot: snapshot})
		return struct{}{}, err
	})
	if err != nil {
		return err
	}
	if life.Boot == "" {
		list = nil // nobody has named this life yet
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.life, s.voids, s.list = life, voids, list
	return nil
}
