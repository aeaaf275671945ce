package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	// lookInterval is the time between two looks at the tables.
	lookInterval = 10 * time.Millisecond
	// slack is how much longer than its lease a dead replica may keep others
	// waiting, and how long any other change may take: the machine may be busy.
	slack = 5 * time.Second
	// patience is how long the last messages may take.
	patience = 15 * time.Second
)

// phases are what the program goes through while orders are changed. Its methods
// belong to one goroutine.
type phases struct {
	db        *pgxpool.Pool
	consumer  *outbox.Consumer
	processes *processes
	load      *load
	steady    time.Duration
	out       io.Writer

	// began is when the present phase did, after which row of handled.
	began time.Time
	after int64
}

func (p *phases) run(ctx context.Context) error {
	for _, phase := range []func(context.Context) error{
		p.start, p.kill, p.startAgain("B"), p.stop, p.startAgain("C"), p.restartAll, p.reshard, p.end,
	} {
		err := phase(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx) // a writer or a replica could not go on
		case err != nil:
			return err
		}
	}
	return nil
}

// start has the shards shared among replicas that come at the same time.
func (p *phases) start(ctx context.Context) error {
	p.begin("Start: %d replicas, %d shards", len(names), shards)
	for _, name := range names {
		if err := p.processes.start(ctx, name); err != nil {
			return err
		}
	}
	return p.untilEven(ctx, shards, slack)
}

// kill leaves shards with a process that cannot give them up: the others wait
// until its lease has run out.
func (p *phases) kill(ctx context.Context) error {
	p.begin("Kill B (kill -9); the others take over when its lease of %s has run out", lease)
	if err := p.processes.kill9("B"); err != nil {
		return err
	}
	return p.untilEven(ctx, shards, lease+slack)
}

// startAgain brings a replica back: the others hand shards over, each when it has
// nothing in flight.
func (p *phases) startAgain(name string) func(context.Context) error {
	return func(ctx context.Context) error {
		p.begin("Start %s again", name)
		if err := p.processes.start(ctx, name); err != nil {
			return err
		}
		return p.untilEven(ctx, shards, slack)
	}
}

// stop ends a replica in good order: it gives its shards up, and nobody waits for
// a lease.
func (p *phases) stop(ctx context.Context) error {
	p.begin("Stop C (SIGTERM)")
	wait, err := p.processes.stop("C")
	if err != nil {
		return err
	}
	if err := p.untilEven(ctx, shards, slack); err != nil {
		return err
	}
	return wait()
}

// restartAll is a deployment.
func (p *phases) restartAll(ctx context.Context) error {
	for _, name := range names {
		p.begin("Rolling restart: %s", name)
		wait, err := p.processes.stop(name)
		if err != nil {
			return err
		}
		if err := wait(); err != nil {
			return err
		}
		if err := p.processes.start(ctx, name); err != nil {
			return err
		}
		if err := p.untilEven(ctx, shards, slack); err != nil {
			return err
		}
	}
	return nil
}

// reshard divides the topic anew while it is read.
func (p *phases) reshard(ctx context.Context) error {
	p.begin("Reshard: %d shards instead of %d", fewerShards, shards)
	if err := p.consumer.Reshard(ctx, group, topic, fewerShards); err != nil {
		return err
	}
	return p.untilEven(ctx, fewerShards, slack)
}

// end has the last messages handled, or not when that takes too long, and stops
// all replicas.
func (p *phases) end(ctx context.Context) error {
	p.begin("End: wait for the last message")
	p.load.end()
	for {
		left, err := unhandled(ctx, p.db)
		if err != nil {
			return err
		}
		if left == 0 {
			fmt.Fprintf(p.out, "  handled after %s\n", seconds(time.Since(p.began)))
			break
		}
		if time.Since(p.began) > patience {
			fmt.Fprintf(p.out, "  %d messages were not handled within %s\n", left, patience)
			break
		}
		if err := pause(ctx, lookInterval); err != nil {
			return err
		}
	}
	for _, name := range names {
		wait, err := p.processes.stop(name)
		if err != nil {
			return err
		}
		if err := wait(); err != nil {
			return err
		}
	}
	return nil
}

func (p *phases) begin(what string, args ...any) {
	fmt.Fprintf(p.out, what+"\n", args...)
	p.began = time.Now()
}

// untilEven waits until the shards are spread evenly, goes on for a while, and
// says how it went.
func (p *phases) untilEven(ctx context.Context, shards int, limit time.Duration) error {
	running := p.processes.pids()
	for {
		b, err := look(ctx, p.db)
		if err != nil {
			return fmt.Errorf("look at the shards: %w", err)
		}
		took := time.Since(p.began)
		if b.even(running, shards) {
			return p.tell(ctx, b.text(running), took)
		}
		if took > limit {
			return fmt.Errorf("the shards are not spread evenly within %s: %s", limit, b.text(running))
		}
		if err := pause(ctx, lookInterval); err != nil {
			return err
		}
	}
}

// tell ends a phase.
func (p *phases) tell(ctx context.Context, balance string, took time.Duration) error {
	if err := pause(ctx, p.steady); err != nil {
		return err
	}
	n, longest, last, err := waits(ctx, p.db, p.after)
	if err != nil {
		return err
	}
	p.after = last
	fmt.Fprintf(p.out, "  %s after %s; %d messages, the longest wait %s\n", balance, seconds(took), n, seconds(longest))
	return nil
}

// pause lets time pass.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2fs", d.Seconds()) }
