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
	// how many ms the slowest but one percent; where a bare reader's takes about
	// as long, or longer, latencyMaxBare is how many times that.
	latencyMaxCommits = 4
	latencyMaxTail    = 5
	latencyMaxBare    = 2
)

// latencyScenario: from the begin of the publishing commit until the handler has
// the message, at a steady pace that does not wait for deliveries. The baseline
// is what the same commits take while nobody subscribes.
func latencyScenario(ctx context.Context, b *bench) error {
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	var alone, bare, wal, poll latencies
	metric := fmt.Sprintf("%d a second", latencyRate)
	turn := func(l *latencies, open opener) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) { return l.turn(ctx, b, d, open) }
	}
	_, err = b.rounds(ctx, metric+", p50",
		contender{"commit", turn(&alone, nil)},
		contender{"bare", turn(&bare, openBare(d, 0))},
		contender{"WAL", turn(&wal, wal.open(d, outbox.ModeWAL))},
		contender{"polling", turn(&poll, poll.open(d, outbox.ModePoll))})
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
	add("WAL, p99 against commits", &wal, wal.p99, alone.commit99, nil)
	add("WAL, p50 against a bare reader", &wal, wal.p50, bare.p50, nil)
	add("WAL, p99 against a bare reader", &wal, wal.p99, bare.p99, maxValue(latencyMaxTail).or(maxRatio(latencyMaxBare)))
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

// opener lets somebody receive; the function returned ends that. handle is called
// with each payload in one goroutine, and fail when what comes ends early.
type opener func(ctx context.Context, handle func(payload []byte), fail func(error)) (close func() error, err error)

// openBare lets a bare stream receive, which pauses before it reads again.
func openBare(d *database, pause time.Duration) opener {
	return func(ctx context.Context, handle func([]byte), fail func(error)) (func() error, error) {
		stream, err := openBareStream(ctx, d.url(), pause)
		if err != nil {
			return nil, err
		}
		reading, stop := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			fail(stream.read(reading, func(r bareStreamRow) { handle(r.payload) }))
		}()
		return func() error {
			stop()
			<-ended
			return stream.close(context.WithoutCancel(ctx))
		}, nil
	}
}

// open lets a subscription receive, and notes if it does not stay live.
func (l *latencies) open(d *database, mode outbox.Mode) opener {
	return func(ctx context.Context, handle func([]byte), _ func(error)) (func() error, error) {
		subscription, err := listen(ctx, d.pool.Config(), mode, "orders", handle)
		if err != nil {
			return nil, err
		}
		before := subscription.status()
		return func() error {
			after := subscription.status()
			if mode == outbox.ModeWAL && (after.Source != outbox.SourceWAL || !after.Since.Equal(before.Since)) {
				l.problem = "the WAL was left: " + cmp.Or(after.Reason, "it is there again")
			}
			return subscription.close()
		}, nil
	}
}

// turn publishes for a while to whoever open lets receive, or with nil to nobody,
// and returns the middle of what that is about.
func (l *latencies) turn(ctx context.Context, b *bench, d *database, open opener) (p50 float64, err error) {
	number := func(t time.Duration) int { return max(int(b.duration(t).Seconds()*latencyRate), 1) }
	warmUp := number(latencyWarmUp)
	n := warmUp + number(latencyTurn)
	p := newPace(latencyRate, latencyConns, n)
	ages := make(series, n)
	if open == nil {
		err = p.run(ctx, d, "orders")
	} else {
		err = deliver(ctx, d, p, open, ages)
	}
	if err != nil {
		return 0, err
	}
	l.problem = cmp.Or(p.problem(), l.problem)
	commits := p.commits[warmUp:]
	l.commit50, l.commit99 = append(l.commit50, commits.quantile(0.5)), append(l.commit99, commits.quantile(0.99))
	if open == nil {
		return commits.quantile(0.5), nil
	}
	ages = ages[warmUp:]
	l.p50, l.p99 = append(l.p50, ages.quantile(0.5)), append(l.p99, ages.quantile(0.99))
	return ages.quantile(0.5), nil
}

// deliver publishes, and notes how old each message is when it is received.
func deliver(ctx context.Context, d *database, p *pace, open opener, ages series) (err error) {
	m := newMeter()
	m.time(1, int64(len(ages)))
	closeIt, err := open(ctx, func(payload []byte) {
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
	}, m.fail)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeIt()) }()
	if err := p.run(ctx, d, "orders"); err != nil {
		return err
	}
	_, err = m.await(ctx)
	return err
}
