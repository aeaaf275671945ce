package upkeep

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

// pass is one round of steps.
type pass struct {
	*Upkeep

	session Session
	// table runs on the session.
	table  table
	status Status
	// retention is the one in force.
	retention time.Duration
	// noFree and noDrop say that the locks to empty a partition, or to drop one, were
	// not to be had: they would not be for the next one either, and others have
	// waited for one try already.
	noFree, noDrop bool
	// keep says that nothing is emptied and nothing deleted from the log.
	keep bool
}

// problem notes something that is not as it should be.
func (p *pass) problem(object string, err error) {
	p.status.Problems = append(p.status.Problems, &Problem{Object: object, Err: err})
}

// tried takes the error of a step: it returns those after which no step would fare
// better, and notes the others.
func (p *pass) tried(ctx context.Context, object string, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case stateOf(err) == stateLock:
		p.status.Postponed = append(p.status.Postponed, object)
		p.config.Logger.Debug("A lock was not to be had; the step is tried again at the next pass", watermill.LogFields{"object": object})
		return nil
	case !errors.As(err, new(*foundError)) && ends(err) && !errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w", object, err)
	}
	p.problem(object, err)
	return nil
}

// foundError is a problem of one object, whatever its cause.
type foundError struct{ err error }

// Error implements error.
func (e *foundError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *foundError) Unwrap() error { return e.err }

// run does it all, in this order: room for what comes, before the rest.
func (p *pass) run(ctx context.Context) error {
	problems, err := p.table.problems(ctx, "SELECT s.object, s.problem FROM outbox.upkeep_sync() s")
	p.status.Problems = append(p.status.Problems, problems...)
	if err := p.tried(ctx, "partitions of messages", err); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{p.check, p.ahead, p.log, p.sweep} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// check finds the retention that is in force. One that makes no sense with the
// partitions is refused: nothing goes until it does.
func (p *pass) check(ctx context.Context) error {
	var width float64
	err := p.table.call(ctx, p.config.Timeout, "SELECT outbox.upkeep_width()", nil, &width)
	p.keep = err != nil
	if err := p.tried(ctx, "table meta", err); err != nil {
		return err
	}
	interval := time.Duration(width * float64(time.Second))
	switch p.retention = p.config.Retention; {
	case p.retention == 0:
		p.retention = max(DefaultRetention, interval)
	case p.retention < interval:
		p.keep = true
		p.problem("retention", fmt.Errorf("%s is shorter than partition_interval in table meta (%s): nothing is emptied until one of them is changed", p.retention, interval))
	}
	return nil
}

// ahead makes the partitions up to the look-ahead.
func (p *pass) ahead(ctx context.Context) error {
	// One that a pass before has left behind.
	if err := p.unguard(ctx); err != nil {
		return err
	}
	spans, err := p.table.ranges(ctx)
	if err := p.tried(ctx, "partitions ahead", err); err != nil {
		return err
	}
	// tries is how many times the DEFAULT partition may still be searched: the guard on
	// what comes next may end before that is through, and what lies further ahead, or
	// behind a gap in what was proven, is left time for.
	var guarded bool
	var ready time.Time
	for i, tries := 0, 2; i < len(spans); i++ {
		s := spans[i]
		if s.problem != nil {
			p.problem(s.String(), errors.New(*s.problem))
			continue
		}
		word, err := p.make(ctx, s)
		if err == nil && word == "guard" && tries > 0 && s.lower.After(ready) {
			tries--
			began, postponed := time.Now(), len(p.status.Postponed)
			if guarded, err = p.guard(ctx, spans[i:]); err != nil {
				return err
			}
			if len(p.status.Postponed) > postponed {
				break // a lock that would not be had for the next one either
			}
			if guarded {
				word, err = p.make(ctx, s)
			}
			ready = time.Now().Add(2*time.Since(began) + s.upper.Sub(s.lower))
		}
		if err == nil && word == "guard" || stateOf(err) == stateLate {
			continue
		}
		failed := p.tried(ctx, s.String(), err)
		if failed != nil {
			return failed
		}
		if stateOf(err) == stateLock {
			break // nor for the next one
		}
		if word == "made" {
			p.config.Logger.Debug("Made a "+s.String(), nil)
		}
	}
	if guarded {
		return p.unguard(ctx)
	}
	return nil
}

func (p *pass) make(ctx context.Context, s span) (string, error) {
	return p.table.word(ctx, "SELECT outbox.upkeep_make($1::timestamptz, $2::timestamptz)", s.lower, s.upper)
}

// guard proves the DEFAULT partition empty of as many ranges as follow on each
// other. It reports whether there is a guard now.
func (p *pass) guard(ctx context.Context, spans []span) (bool, error) {
	last := spans[0]
	for _, s := range spans[1:] {
		if s.problem != nil || !s.lower.Equal(last.upper) {
			break
		}
		last = s
	}
	err := p.table.done(ctx, "SELECT outbox.upkeep_guard($1::timestamptz, $2::timestamptz)::text", spans[0].lower, last.upper)
	if stateOf(err) == stateLate {
		return false, nil // the next range may do
	}
	guarded := err == nil
	if guarded {
		var ignored any
		err = p.table.call(ctx, longTimeout, "SELECT outbox.upkeep_validate()::text", nil, &ignored)
		if stateOf(err) == stateCheck {
			err = nil // a row has come in between; upkeep_ranges tells of it the next time
		}
	}
	return guarded, p.tried(ctx, "partition messages_default", err)
}

func (p *pass) unguard(ctx context.Context) error {
	var was bool
	return p.tried(ctx, "partition messages_default", p.table.call(ctx, p.config.Timeout, "SELECT outbox.upkeep_unguard()", nil, &was))
}

// log brings each partition on its way.
func (p *pass) log(ctx context.Context) error {
	list, err := p.table.partitions(ctx, p.config.SealDelay)
	if err != nil {
		return p.tried(ctx, "table partitions", err)
	}
	for _, part := range list {
		advance := p.partition
		if part.Default() {
			advance = p.spare
		}
		before, postponed := len(p.status.Problems), len(p.status.Postponed)
		err := advance(ctx, part)
		if err := p.tried(ctx, "partition "+part.Name, err); err != nil {
			return err
		}
		var note *string
		switch {
		case err != nil && len(p.status.Problems) > before:
			text := err.Error()
			note = &text
		case len(p.status.Postponed) > postponed:
			continue // it says nothing about the partition
		}
		if note == nil && part.Error == "" {
			continue
		}
		if err := p.tried(ctx, "partition "+part.Name, p.table.done(ctx, "SELECT outbox.upkeep_note($1::text, $2::text)::text", part.Name, note)); err != nil {
			return err
		}
	}
	return nil
}

// partition brings one with a range as far as it may go now.
func (p *pass) partition(ctx context.Context, part Partition) error {
	if part.State == Detached {
		return nil // what there is to do is somebody else's: upkeep_sync has said it
	}
	if part.State == Open || part.State == Waiting {
		if !part.due {
			return nil
		}
		word, err := p.table.word(ctx, "SELECT outbox.upkeep_seal($1::text, $2::float8)", part.Name, p.config.SealDelay.Seconds())
		if word == "waiting" && time.Since(part.Upper) > p.config.SealDelay+p.retention {
			p.problem("partition "+part.Name, errors.New("cannot be sealed, and so never goes: a transaction that was writing to the log at its end is still open; end it, or commit or roll back what was prepared (pg_prepared_xacts)"))
		}
		if err != nil || word != "sealed" {
			return err
		}
		part.State = Sealed
	}
	strays := 0
	for range maxStrays { // what is left is for the next pass: the seal stands
		n, err := p.table.count(ctx, "SELECT outbox.upkeep_strays($1::text, $2::integer)", part.Name, batch)
		if err == nil && n < 0 {
			if err = p.table.done(ctx, "SELECT outbox.upkeep_identify($1::text)::text", part.Name); err == nil {
				continue
			}
		}
		if err != nil {
			return err
		}
		if strays += n; n == 0 {
			break
		}
		p.config.Logger.Info("Messages were inserted into the past; they are published again", watermill.LogFields{"partition": part.Name, "messages": n})
		p.problem("partition "+part.Name, fmt.Errorf("%d messages came after the partition was sealed, as after a clock that was set back: they were published again", n))
		if n < batch {
			break // what is still being written is for the next pass
		}
	}
	if strays > 0 {
		return nil
	}
	if part.State == Freed {
		return p.drop(ctx, part)
	}
	hold, err := p.look(ctx, part)
	if err != nil || hold != nil {
		return err
	}
	return p.free(ctx, part)
}

// look notes whether all of a partition was delivered.
func (p *pass) look(ctx context.Context, part Partition) (*Hold, error) {
	var text *string
	if err := p.table.call(ctx, p.config.Timeout, "SELECT outbox.upkeep_look($1::text, $2::float8)::text",
		[]any{part.Name, p.config.UnreadRetention.Seconds()}, &text); err != nil {
		return nil, err
	}
	hold, err := parseHold(text)
	if err != nil || hold == nil {
		return nil, err
	}
	if since := part.HeldSince; !since.IsZero() && time.Since(since) > p.retention {
		p.problem("partition "+part.Name, fmt.Errorf("is held back: %s", hold))
	}
	return hold, nil
}

// free archives and empties one that was delivered long enough ago.
func (p *pass) free(ctx context.Context, part Partition) error {
	if p.noFree || p.keep {
		return nil
	}
	empty := func() (string, error) {
		word, err := p.table.word(ctx, "SELECT outbox.upkeep_free($1::text, $2::float8, $3::float8, $4::boolean)",
			part.Name, p.retention.Seconds(), p.config.UnreadRetention.Seconds(), p.config.Archive != nil)
		p.noFree = stateOf(err) == stateLock
		if word == "freed" {
			p.config.Logger.Debug("Emptied a partition", watermill.LogFields{"partition": part.Name})
		}
		return word, err
	}
	word, err := empty()
	if err != nil || word != "unarchived" {
		return err
	}
	if part.seal == "" {
		return nil // sealed in this pass; the next one has it
	}
	if err := p.archive(ctx, part); err != nil {
		return &foundError{err}
	}
	_, err = empty()
	return err
}

// drop drops the shell of one that was freed.
func (p *pass) drop(ctx context.Context, part Partition) error {
	if p.noDrop {
		return nil
	}
	word, err := p.table.word(ctx, "SELECT outbox.upkeep_drop($1::text)", part.Name)
	if word == "busy" || stateOf(err) == stateLock {
		p.noDrop = true
	}
	if word == "busy" {
		p.status.Postponed = append(p.status.Postponed, "partition "+part.Name)
	}
	return err
}

// spare clears the DEFAULT partition.
func (p *pass) spare(ctx context.Context, part Partition) error {
	if part.State == Detached {
		return nil
	}
	if part.State == Open {
		word, err := p.table.word(ctx, "SELECT outbox.upkeep_seal($1::text, 0::float8)", part.Name)
		if err != nil || word != "sealed" {
			return err
		}
	}
	p.problem("partition "+part.Name, errors.New("has messages: there was no partition for their time; they are delivered from there, and deleted when everybody has them"))
	hold, err := p.look(ctx, part)
	if err != nil || hold != nil || p.keep {
		return err
	}
	var at place
	at.era = -1 << 63
	for {
		began := time.Now()
		to, seen, _, err := p.table.remove(ctx, at, p.retention, p.config.UnreadRetention, p.config.Archive != nil, batch)
		if err == nil && seen == unarchived && part.seal != "" { // of what is marked in this pass the next one knows
			if err := p.archive(ctx, part); err != nil {
				return &foundError{err}
			}
			continue
		}
		if err != nil || seen < batch {
			return err
		}
		at = to
		// Half of the time is others'.
		if !backoff.Wait(ctx, time.Since(began)) {
			return context.Cause(ctx)
		}
	}
}

// sweep removes what is old in the other tables.
func (p *pass) sweep(ctx context.Context) error {
	for _, table := range []struct {
		name string
		age  time.Duration
	}{
		{"inbox", p.config.InboxRetention},
		{"dead_letters", p.config.DeadLetterRetention},
		{"dead_letter_log", p.config.DeadLetterRetention},
	} {
		for table.age > 0 {
			began := time.Now()
			n, err := p.table.count(ctx, "SELECT outbox.upkeep_sweep($1::text, $2::float8, $3::integer)", table.name, table.age.Seconds(), batch)
			if err := p.tried(ctx, "table "+table.name, err); err != nil {
				return err
			}
			if err != nil || n < batch {
				break
			}
			if !backoff.Wait(ctx, time.Since(began)) {
				return context.Cause(ctx)
			}
		}
	}
	return p.bury(ctx)
}
