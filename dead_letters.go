package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/millrace/watermill-outbox/internal/metadata"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// MinRequeuePerSecond is the slowest rate of a requeue: one an hour.
	MinRequeuePerSecond = 1.0 / 3600

	// MaxActorBytes bounds the name of an actor.
	MaxActorBytes = 1024
)

// DeadLettersConfig configures DeadLetters. The zero value works.
type DeadLettersConfig struct {
	// Schema is the schema the outbox tables live in. Defaults to
	// schema.DefaultName ("outbox").
	Schema string

	// Actor is who is at work, for the audit trail: a person, a ticket, a
	// program. At most MaxActorBytes. Defaults to the database role.
	Actor string
}

func (c DeadLettersConfig) withDefaults() DeadLettersConfig {
	c.Schema = cmp.Or(c.Schema, schema.DefaultName)
	return c
}

func (c DeadLettersConfig) validate() error {
	if err := schema.ValidateName(c.Schema); err != nil {
		return fmt.Errorf("outbox: DeadLettersConfig.Schema: %w", err)
	}
	if problem := textProblem(c.Actor, MaxActorBytes); problem != "" {
		return fmt.Errorf("outbox: DeadLettersConfig.Actor %s", problem)
	}
	return nil
}

// DeadLetters looks at the messages that consumer groups have given up on, sends
// them back to their group, or deletes them. Each change is one statement, the
// entry in the audit trail included. It needs no Consumer, has no goroutines and
// nothing to close, and is safe for concurrent use as far as its database handle
// is. The role needs what schema.Grants gives a consumer.
//
// The context of each method bounds it. A bad argument is refused before any
// SQL, with an error that names the field.
type DeadLetters struct {
	config DeadLettersConfig
	db     executor
}

// NewDeadLetters returns DeadLetters that work through db, which may be of the
// same kinds as for NewPublisher. Given a pool, it checks that the tables are
// there. Given a transaction, or a connection that is in one, everything is done
// in it: somebody else commits, and an error has aborted it.
func NewDeadLetters(db any, config DeadLettersConfig) (*DeadLetters, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	e, err := newExecutor(db)
	if err != nil {
		return nil, err
	}
	if !e.canQuery() {
		return nil, fmt.Errorf("%w: %T has no method to query with", ErrUnsupportedExecutor, db)
	}
	if row, ok := e.row(); ok && isPool(db) {
		ctx, cancel := context.WithTimeout(context.Background(), constructTimeout)
		defer cancel()
		if err := schema.RequireVersion(ctx, row, config.Schema); err != nil {
			return nil, fmt.Errorf("outbox: new dead letters: %w", err)
		}
	}
	return &DeadLetters{config: config, db: e}, nil
}

// List returns a page of the dead letters that meet the filter, by ascending id.
// To go through all, ask for the page after the last id until one is empty. A
// page may be shorter than its limit before the end: it ends at 8 MiB, or at one
// letter if that is longer.
func (d *DeadLetters) List(ctx context.Context, filter DeadLetterFilter, page DeadLetterPage) ([]DeadLetter, error) {
	where, err := filter.conditions()
	if err == nil {
		err = page.validate()
	}
	if err != nil {
		return nil, err
	}
	letters, err := d.list(ctx, where, page)
	if err != nil {
		return nil, fmt.Errorf("outbox: list dead letters: %w", explain(err, d.config.Schema))
	}
	return letters, nil
}

func (d *DeadLetters) list(ctx context.Context, where *conditions, page DeadLetterPage) ([]DeadLetter, error) {
	where.add("d.id > ?::bigint", page.After)
	limit := where.arg(cmp.Or(page.Limit, DefaultDeadLetterPage))
	bytes := where.arg(listBytes)
	text := fmt.Sprintf(listDeadLetters, where, limit, bytes)
	letters := []DeadLetter{}
	err := d.db.query(ctx, schema.Text(d.config.Schema, text), where.args, func(scan func(...any) error) error {
		var l DeadLetter
		err := scan(&l.ID, &l.ConsumerGroup, &l.Topic, &l.OrderingKey, &l.UUID, &l.RawMetadata, &l.Payload,
			&l.Era, &l.MessageID, &l.PublishedAt, &l.Attempts, &l.Error, &l.DiedAt)
		if err != nil {
			return err
		}
		if m, err := metadata.Decode(l.RawMetadata); err == nil {
			l.Metadata = m
		}
		letters = append(letters, l)
		return nil
	})
	return letters, err
}

// Count returns how many dead letters meet the filter.
func (d *DeadLetters) Count(ctx context.Context, filter DeadLetterFilter) (int, error) {
	where, err := filter.conditions()
	if err != nil {
		return 0, err
	}
	var n int
	if err := d.row(ctx, fmt.Sprintf(countDeadLetters, where), where.args, &n); err != nil {
		return 0, fmt.Errorf("outbox: count dead letters: %w", err)
	}
	return n, nil
}

// Get returns a dead letter, or ErrDeadLetterNotFound.
func (d *DeadLetters) Get(ctx context.Context, id int64) (DeadLetter, error) {
	letters, err := d.List(ctx, DeadLetterFilter{IDs: []int64{id}}, DeadLetterPage{Limit: 1})
	switch {
	case err != nil:
		return DeadLetter{}, err
	case len(letters) == 0:
		return DeadLetter{}, fmt.Errorf("%w: %d", ErrDeadLetterNotFound, id)
	}
	return letters[0], nil
}

// Requeue sends a dead letter back to its group, and to no other: it becomes a
// new message at the end of the topic, with the UUID, ordering key and payload
// of the one that died, and its attempts are counted from the start. Of the
// metadata, the keys that were added when it died are taken out again
// (reason_poisoned, topic_poisoned, handler_poisoned, subscriber_poisoned);
// metadata that are not an object of strings stay as they are. The reason, at
// most MaxReasonBytes, goes into the audit trail and may be "".
//
// It returns ErrDeadLetterNotFound if there is none, because it was requeued or
// discarded already, for instance.
func (d *DeadLetters) Requeue(ctx context.Context, id int64, reason string) error {
	return d.one(ctx, "requeue", requeueNow, id, reason)
}

// Discard deletes a dead letter for good. The reason, at most MaxReasonBytes,
// goes into the audit trail and may be "". It returns ErrDeadLetterNotFound if
// there is none.
func (d *DeadLetters) Discard(ctx context.Context, id int64, reason string) error {
	return d.one(ctx, "discard", discard, id, reason)
}

func (d *DeadLetters) one(ctx context.Context, what string, m move, id int64, reason string) error {
	if err := validateReason("reason", reason); err != nil {
		return err
	}
	where := new(conditions)
	where.add("d.id = ?::bigint", id)
	n, _, err := d.move(ctx, m, where, 1, reason, nil)
	switch {
	case err != nil:
		return fmt.Errorf("outbox: %s dead letter %d: %w", what, id, err)
	case n == 0:
		return fmt.Errorf("%w: %d", ErrDeadLetterNotFound, id)
	}
	return nil
}

// RequeueOptions say how RequeueAll goes about it. The zero value sends all back
// at once.
type RequeueOptions struct {
	// PerSecond spreads the messages over time, for handlers, or what they
	// call, that would not bear all at once: they become due one by one, by the
	// database's clock, the first at once. Until then they wait in the table
	// deferred. At least MinRequeuePerSecond. Defaults to 0, which is no bound.
	PerSecond float64
	// Limit is how many are sent back at most, those that died first. Defaults
	// to 0, which is no limit.
	Limit int
	// Reason goes into the audit trail, at most MaxReasonBytes. Defaults to "".
	Reason string
}

func (o RequeueOptions) validate() error {
	// NaN is not below anything.
	if o.PerSecond != 0 && !(o.PerSecond >= MinRequeuePerSecond && !math.IsInf(o.PerSecond, 0)) {
		return fmt.Errorf("outbox: RequeueOptions.PerSecond must be 0, or at least %.6f (one an hour), is %v", MinRequeuePerSecond, o.PerSecond)
	}
	if o.Limit < 0 {
		return fmt.Errorf("outbox: RequeueOptions.Limit must not be negative, is %d", o.Limit)
	}
	return validateReason("RequeueOptions.Reason", o.Reason)
}

// RequeueAll sends the dead letters that meet the filter back as Requeue does,
// in the order in which they died, and returns how many. Those that die
// meanwhile are left alone: no message goes round in circles. The filter must
// have a condition, or All.
//
// It works in batches of 1000, and fewer if their payloads are long. With a
// transaction as handle all are in it. Otherwise each batch commits: after an
// error the count says how many have been sent back, unless the connection broke
// before an answer came, and another call goes on with the rest.
func (d *DeadLetters) RequeueAll(ctx context.Context, filter DeadLetterFilter, options RequeueOptions) (int, error) {
	if err := options.validate(); err != nil {
		return 0, err
	}
	m := requeueNow
	if options.PerSecond > 0 {
		m = requeueLater
	}
	n, err := d.all(ctx, m, filter, options)
	if err != nil {
		return n, fmt.Errorf("outbox: requeue dead letters: %w", err)
	}
	return n, nil
}

// DiscardAll deletes the dead letters that meet the filter for good, and returns
// how many. What is said of RequeueAll about batches and the filter holds here,
// too.
func (d *DeadLetters) DiscardAll(ctx context.Context, filter DeadLetterFilter, reason string) (int, error) {
	if err := validateReason("reason", reason); err != nil {
		return 0, err
	}
	n, err := d.all(ctx, discard, filter, RequeueOptions{Reason: reason})
	if err != nil {
		return n, fmt.Errorf("outbox: discard dead letters: %w", err)
	}
	return n, nil
}

// all moves what meets the filter, batch by batch.
func (d *DeadLetters) all(ctx context.Context, m move, filter DeadLetterFilter, options RequeueOptions) (n int, err error) {
	if _, err := filter.change(); err != nil {
		return 0, err
	}
	inTx := d.db.inTx()
	// What dies from now on has a higher id.
	var top int64
	pace := &pace{perSecond: options.PerSecond}
	if err := d.row(ctx, topDeadLetter, nil, &top, &pace.from); err != nil {
		return 0, err
	}
	limit := cmp.Or(options.Limit, math.MaxInt)
	for last := int64(0); n < limit; {
		where, err := filter.change()
		if err != nil {
			return n, err
		}
		// Not from the start: the entries of the index that the batches before
		// left dead would be walked again by each.
		where.add("d.id > ?::bigint", last)
		where.add("d.id <= ?::bigint", top)
		pace.done = n
		moved, lastMoved, err := d.move(ctx, m, where, min(limit-n, moveRows), options.Reason, pace)
		switch {
		case err != nil && inTx:
			return 0, err // none of it will be committed
		case err != nil:
			return n, err
		case moved == 0:
			return n, nil
		}
		n, last = n+moved, lastMoved
	}
	return n, nil
}

// pace says when requeued messages are due.
type pace struct {
	from      time.Time
	perSecond float64
	// done is how many have been requeued already.
	done int
}

// move moves at most limit dead letters in one statement, and returns how many
// and the highest of their ids. The pace is for requeueLater alone.
func (d *DeadLetters) move(ctx context.Context, m move, where *conditions, limit int, reason string, pace *pace) (n int, last int64, err error) {
	text := m.text(where, limit, d.config.Actor, reason, pace)
	err = d.row(ctx, text, where.args, &n, &last)
	return n, last, err
}

// Bury gives up on a message that a group has not handled, as if its attempts
// were exhausted: one that fails again and again and blocks what comes after it.
// The message becomes a dead letter of the group, and the subscription that
// retries it goes on before the next attempt; an attempt that runs is not ended.
// For other groups nothing changes. Era and id are those of its Delivery; the
// reason, at most MaxReasonBytes, goes into the audit trail and into the dead
// letter's error.
//
// Whether the group has handled the message already is not looked at: the dead
// letter is then one of a message that was handled. If it is a dead letter of
// the group already, nothing happens. Bury returns ErrMessageNotFound if there
// is no such message, or none that the group is to get.
func (d *DeadLetters) Bury(ctx context.Context, group, topic string, era, id int64, reason string) error {
	if err := ValidateTopic(topic); err != nil {
		return err
	}
	if problem := textProblem(group, MaxConsumerGroupBytes); problem != "" {
		return fmt.Errorf("outbox: group %s", problem)
	}
	if group == "" {
		return errors.New("outbox: group is empty")
	}
	if err := validateReason("reason", reason); err != nil {
		return err
	}
	var found int
	err := d.row(ctx, buryMessage, []any{group, topic, era, id, d.config.Actor, reason}, &found)
	switch {
	case err != nil:
		return fmt.Errorf("outbox: bury message %d of topic %q: %w", id, topic, err)
	case found == 0:
		return fmt.Errorf("%w: group %q, topic %q, era %d, id %d", ErrMessageNotFound, group, topic, era, id)
	}
	return nil
}

// Log returns a page of the audit trail, by ascending id: what became of dead
// letters, and at whose hand. To go through all, ask for the page after the last
// id until one is empty; what is recent is found with From. An entry whose
// transaction commits late may have a lower id than some that were seen before.
func (d *DeadLetters) Log(ctx context.Context, filter DeadLetterEventFilter, page DeadLetterPage) ([]DeadLetterEvent, error) {
	where, err := filter.conditions()
	if err == nil {
		err = page.validate()
	}
	if err != nil {
		return nil, err
	}
	where.add("l.id > ?::bigint", page.After)
	limit := where.arg(cmp.Or(page.Limit, DefaultDeadLetterPage))
	text := fmt.Sprintf(listDeadLetterEvents, where, limit)
	events := []DeadLetterEvent{}
	err = d.db.query(ctx, schema.Text(d.config.Schema, text), where.args, func(scan func(...any) error) error {
		var e DeadLetterEvent
		err := scan(&e.ID, &e.At, &e.Action, &e.Actor, &e.Reason, &e.DeadLetterID, &e.ConsumerGroup, &e.Topic,
			&e.OrderingKey, &e.UUID, &e.Era, &e.MessageID, &e.Attempts)
		events = append(events, e)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: read the log of dead letters: %w", explain(err, d.config.Schema))
	}
	return events, nil
}

// row runs a statement that returns one row.
func (d *DeadLetters) row(ctx context.Context, text string, args []any, dest ...any) error {
	err := d.db.query(ctx, schema.Text(d.config.Schema, text), args, func(scan func(...any) error) error {
		return scan(dest...)
	})
	if err != nil {
		return explain(err, d.config.Schema)
	}
	return nil
}

func validateReason(field, reason string) error {
	if problem := textProblem(reason, MaxReasonBytes); problem != "" {
		return fmt.Errorf("outbox: %s %s", field, problem)
	}
	return nil
}
