package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	latencyRate   = 500 // messages a second
	latencyConns  = 4
	latencyWarmUp = time.Second
	latencyTurn   = 6 * time.Second
	// latencyMaxCommits is how many commits a delivery may take, latencyMaxTail
	// how many ms the slowest but one percent.
	latencyMaxCommits = 4
	latencyMaxTail    = 5
)

// latencyScenario: from the begin of the publishing commit until the handler has
// the message, at a steady pace that does not wait for deliveries. The baseline
// is what the same commits take while nobody subscribes.
func latencyScenario(ctx context.Context, b *bench) error {
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	var alone, wal, poll latencies
	metric := fmt.Sprintf("%d a second", latencyRate)
	_, err = b.rounds(ctx, metric+", p50",
		contender{"commit", func(ctx context.Context) (float64, error) { return alone.turn(ctx, b, d, "") }},
		contender{"WAL", func(ctx context.Context) (float64, error) { return wal.turn(ctx, b, d, outbox.ModeWAL) }},
		contender{"polling", func(ctx context.Context) (float64, error) { return poll.turn(ctx, b, d, outbox.ModePoll) }})
	if err != nil {
		return err
	}
	add := func(name string, l *latencies, values, baseline series, required *requirement) {
		f := newFigure(b.scenario, metric+", "+name, "ms", values, baseline, required)
		if why := cmp.Or(l.problem, alone.problem); why != "" {
			f.invalidate(why)
		}
		b.add(f)
	}
	add("WAL, p50 against commits", &wal, wal.p50, alone.commit50, maxRatio(latencyMaxCommits))
	add("WAL, p99 against commits", &wal, wal.p99, alone.commit99, maxValue(latencyMaxTail))
	add("polling, p50 against commits", &poll, poll.p50, alone.commit50, nil)
	add("polling, p99 against commits", &poll, poll.p99, alone.commit99, nil)
	add("commits with WAL against alone, p50", &wal, wal.commit50, alone.commit50, nil)
	add("commits with WAL against alone, p99", &wal, wal.commit99, alone.commit99, nil)
	return nil
}

// latencies are what commits and deliveries took, in ms, one of each per turn.
type latencies struct {
	commit50, commit99, p50, p99 series
	// problem says why they are not what they should be, "" if they are.
	problem string
}

// turn publishes for a while to a subscription, or with mode "" to nobody, and
// returns the middle of what that is about.
func (l *latencies) turn(ctx context.Context, b *bench, d *database, mode outbox.Mode) (p50 float64, err error) {
	number := func(t time.Duration) int { return max(int(b.duration(t).Seconds()*latencyRate), 1) }
	warmUp := number(latencyWarmUp)
	n := warmUp + number(latencyTurn)
	p := newPace(latencyRate, latencyConns, n)
	ages := make(series, n)
	if mode == "" {
		err = p.run(ctx, d, "orders")
	} else {
		err = l.deliver(ctx, d, p, mode, ages)
	}
	if err != nil {
		return 0, err
	}
	l.problem = cmp.Or(p.problem(), l.problem)
	commits := p.commits[warmUp:]
	l.commit50, l.commit99 = append(l.commit50, commits.quantile(0.5)), append(l.commit99, commits.quantile(0.99))
	if mode == "" {
		return commits.quantile(0.5), nil
	}
	ages = ages[warmUp:]
	l.p50, l.p99 = append(l.p50, ages.quantile(0.5)), append(l.p99, ages.quantile(0.99))
	return ages.quantile(0.5), nil
}

// deliver publishes, and notes how old each message is when the handler gets it.
func (l *latencies) deliver(ctx context.Context, d *database, p *pace, mode outbox.Mode, ages series) (err error) {
	m := newMeter()
	m.time(1, int64(len(ages)))
	subscription, err := listen(ctx, d.pool.Config(), mode, "orders", func(payload []byte) {
		i, age, err := p.age(payload)
		if err == nil && ages[i] != 0 {
			err = fmt.Errorf("message %d came twice", i)
		}
		if err != nil {
			m.fail(err)
			return
		}
		ages[i] = age
		m.row()
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, subscription.close()) }()
	before := subscription.status()
	if err := p.run(ctx, d, "orders"); err != nil {
		return err
	}
	if _, err := m.await(ctx); err != nil {
		return err
	}
	after := subscription.status()
	if mode == outbox.ModeWAL && (after.Source != outbox.SourceWAL || !after.Since.Equal(before.Since)) {
		l.problem = "the WAL was left: " + cmp.Or(after.Reason, "it is there again")
	}
	return nil
}
