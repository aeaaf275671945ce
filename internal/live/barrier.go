package live

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/replication"
)

// identity is what must stay the same under a stream.
type identity struct {
	life     window.Life
	timeline string
	// publication identifies it and its tables; "" if there is none.
	publication string
}

// sample is one answer of the barrier.
type sample struct {
	identity
	snapshot window.Snapshot
	// insert is how far the log went, flush how far it was safe on disk.
	insert, flush replication.LSN
	at            time.Time
}

// ask runs the barrier's statement.
func (s *Source) ask(ctx context.Context) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeout)
	defer cancel()
	rows, err := s.config.Barrier.Query(ctx, s.queries.barrier, s.config.Publication)
	if err != nil {
		return sample{}, fmt.Errorf("ask for a snapshot: %w", err)
	}
	var answer sample
	var boot, publication *string
	var snapshot, insert, flush string
	_, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, row.Scan(&answer.life.Era, &boot, &snapshot, &insert, &flush, &answer.timeline, &publication)
	})
	if err != nil {
		return sample{}, fmt.Errorf("ask for a snapshot: %w", err)
	}
	answer.at = time.Now()
	if boot != nil {
		answer.life.Boot = *boot
	}
	if publication != nil {
		answer.publication = *publication
	}
	if answer.snapshot, err = window.ParseSnapshot(snapshot); err != nil {
		return sample{}, err
	}
	if answer.insert, err = replication.ParseLSN(insert); err != nil {
		return sample{}, err
	}
	if answer.flush, err = replication.ParseLSN(flush); err != nil {
		return sample{}, err
	}
	return answer, nil
}

// differs says why a stream that was opened under the identity has ended, or
// returns nil.
func (i identity) differs(now identity) error {
	switch {
	case now.life != i.life || now.timeline != i.timeline:
		return errOtherServer
	case now.publication != i.publication:
		return errPublicationChanged
	}
	return nil
}
