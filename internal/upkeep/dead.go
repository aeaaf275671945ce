package upkeep

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/millrace/watermill-outbox/schema"
)

// deadAfter is for how long this process must have seen no beat of another to
// remove what is left of it. Leases run out in seconds, and no clocks are compared:
// times in the table may be anybody's.
const deadAfter = time.Hour

// sightings are the beats of processes, and since when each has been the same.
type sightings map[string]sighting

type sighting struct {
	beat  int64
	since time.Time
}

// dead notes the beats that there are now, and returns those that have been the same
// for so long.
func (s sightings) dead(now time.Time, beats map[string]int64, after time.Duration) (dead map[string]int64) {
	for holder := range s {
		if _, ok := beats[holder]; !ok {
			delete(s, holder)
		}
	}
	for holder, beat := range beats {
		seen, ok := s[holder]
		if !ok || seen.beat != beat {
			s[holder] = sighting{beat: beat, since: now}
			continue
		}
		if now.Sub(seen.since) >= after {
			if dead == nil {
				dead = map[string]int64{}
			}
			dead[holder] = beat
		}
	}
	return dead
}

// bury removes processes that have died, with what they wanted.
func (p *pass) bury(ctx context.Context) error {
	rows, err := p.table.db.Query(ctx, schema.Text(p.config.Schema, "SELECT p.holder, p.beat FROM outbox.processes p"))
	if err != nil {
		return p.tried(ctx, "table processes", err)
	}
	beats := map[string]int64{}
	var holder string
	var beat int64
	if _, err := pgx.ForEachRow(rows, []any{&holder, &beat}, func() error {
		beats[holder] = beat
		return nil
	}); err != nil {
		return p.tried(ctx, "table processes", err)
	}
	var holders []string
	var last []int64
	for holder, beat := range p.sightings.dead(time.Now(), beats, deadAfter) {
		holders, last = append(holders, holder), append(last, beat)
	}
	if len(holders) == 0 {
		return nil
	}
	_, err = p.table.count(ctx, "SELECT outbox.upkeep_bury($1::text[], $2::bigint[])", holders, last)
	return p.tried(ctx, "table processes", err)
}
