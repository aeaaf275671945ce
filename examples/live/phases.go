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
	// lookInterval is the time between two looks at the status, which asks no
	// database.
	lookInterval = time.Millisecond
	// patience is how long anything that is waited for may take.
	patience = 15 * time.Second
)

// phases are what the program goes through while messages are published. Its
// methods belong to one goroutine.
type phases struct {
	db       *pgxpool.Pool
	consumer *outbox.Consumer
	book     *book
	liveFor  time.Duration
	// endPublishing returns when the last message is committed.
	endPublishing func()

	out   io.Writer
	began time.Time
	// told is what was last said of the source.
	told string
}

// both shows both ways of reading.
func (p *phases) both(ctx context.Context) error {
	p.begin("Start: messages are polled until there is a stream")
	if err := p.untilLive(ctx, time.Time{}); err != nil {
		return err
	}
	p.end()

	p.begin("Live")
	if err := p.during(ctx, p.liveFor); err != nil {
		return err
	}
	p.end()

	p.begin("Cut: the server ends the stream, messages are polled until there is another one")
	cut := time.Now()
	if err := p.cutStream(ctx); err != nil {
		return err
	}
	if err := p.untilLive(ctx, cut); err != nil {
		return err
	}
	p.end()

	p.begin("Live again")
	return p.last(ctx)
}

// polling is all there is to show until somebody has changed what the status
// then says.
func (p *phases) polling(ctx context.Context) error {
	p.begin("Polling")
	return p.last(ctx)
}

// last ends with the last message, or without it when that takes too long.
func (p *phases) last(ctx context.Context) error {
	if err := p.during(ctx, p.liveFor); err != nil {
		return err
	}
	p.endPublishing()
	end := time.Now().Add(patience)
	err := p.watch(ctx, func(outbox.Status) bool { return p.book.missing() == 0 || time.Now().After(end) })
	p.end()
	return err
}

func (p *phases) begin(what string) { fmt.Fprintln(p.out, what) }

func (p *phases) end() { fmt.Fprintln(p.out, " ", p.book.endPhase()) }

// cutStream ends the server's process behind the stream, as an administrator
// might. The role may, since the process is one of its own.
func (p *phases) cutStream(ctx context.Context) error {
	_, err := p.db.Exec(ctx, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1",
		p.consumer.Status().Slot)
	if err != nil {
		return fmt.Errorf("cut the stream: %w", err)
	}
	return nil
}

// untilLive waits until messages come from the WAL, by a change after since.
func (p *phases) untilLive(ctx context.Context, since time.Time) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not live within %s", patience))
	defer cancel()
	err := p.watch(ctx, func(status outbox.Status) bool {
		sub := subscription(status)
		return sub.Source == outbox.SourceWAL && sub.Since.After(since)
	})
	if err != nil {
		return fmt.Errorf("%w: %s", err, p.told)
	}
	return nil
}

// during lets time pass.
func (p *phases) during(ctx context.Context, d time.Duration) error {
	end := time.Now().Add(d)
	return p.watch(ctx, func(outbox.Status) bool { return time.Now().After(end) })
}

// watch tells when the source of messages changes, until done says so or the
// context ends.
func (p *phases) watch(ctx context.Context, done func(outbox.Status) bool) error {
	next := time.NewTicker(lookInterval)
	defer next.Stop()
	for {
		status := p.consumer.Status()
		if source := describe(status); source != p.told {
			fmt.Fprintf(p.out, "  %.2fs %s\n", time.Since(p.began).Seconds(), source)
			p.told = source
		}
		if done(status) {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-next.C:
		}
	}
}
