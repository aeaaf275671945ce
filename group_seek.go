package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/millrace/watermill-outbox/internal/cursor"
)

// MaxGroupCount is how many messages a Seek counts of each kind at most.
const MaxGroupCount = 100_000

var (
	// ErrWouldSkip is returned by Seek when messages would be skipped that the
	// group has not had; SeekResult.Skipped says how many. Nothing was changed. If
	// that is what you want, set SeekOptions.AllowSkip.
	ErrWouldSkip = errors.New("outbox: messages would be skipped that were not delivered")

	// ErrNoSuchPosition is returned by Seek for an id that no message has yet, or an
	// era that no stored message is of. Nothing was changed. Take both from a
	// Delivery.
	ErrNoSuchPosition = errors.New("outbox: there is no such position")
)

// SeekTo is where a consumer group is moved to. Make one with SeekEarliest,
// SeekLatest, SeekMessage or SeekTime; the zero value is refused. In each case
// what is not visible to the move comes: messages whose transactions commit later,
// whatever their ids.
type SeekTo struct {
	to      cursor.To
	problem string
}

// SeekEarliest is before every message that is still stored, as for a new group
// with StartEarliest.
func SeekEarliest() SeekTo { return SeekTo{to: cursor.To{Kind: "earliest"}} }

// SeekLatest is behind every message that is committed, as for a new group with
// StartLatest. What was in flight does not come again.
func SeekLatest() SeekTo { return SeekTo{to: cursor.To{Kind: "latest"}} }

// SeekMessage is before the message of this era and id, see Delivery: it comes
// next, and all whose id is higher. Of those with a lower id, the ones that are
// committed do not come. Era 0 is the server's own. Others come before it, from
// the oldest to the newest: to begin in one means all of those after it.
func SeekMessage(era, id int64) SeekTo {
	s := SeekTo{to: cursor.To{Kind: "id", Era: era, ID: id}}
	switch {
	case id < 1:
		s.problem = fmt.Sprintf("id must be at least 1, is %d", id)
	case era < 0:
		s.problem = fmt.Sprintf("era must not be negative, is %d", era)
	}
	return s
}

// SeekTime is before the first message that was published at the time or later,
// by the server's clock (Delivery.PublishedAt). Ids are drawn in another order, so
// that some messages come which are a little older; none is missing that is not.
// If there is none it is SeekLatest.
func SeekTime(at time.Time) SeekTo {
	s := SeekTo{to: cursor.To{Kind: "time", Time: at}}
	switch {
	case at.IsZero():
		s.problem = "time is zero: use SeekEarliest"
	case at.Year() < 1:
		s.problem = fmt.Sprintf("time must not be before the year 1, is %s", at)
	case at.After(time.Now()):
		s.problem = fmt.Sprintf("time must not be in the future, is %s: use SeekLatest", at)
	}
	return s
}

func (s SeekTo) validate() error {
	switch {
	case s.problem != "":
		return fmt.Errorf("outbox: SeekTo: %s", s.problem)
	case s.to.Kind == "":
		return errors.New("outbox: SeekTo is empty: use SeekEarliest, SeekLatest, SeekMessage or SeekTime")
	}
	return nil
}

// SeekOptions say how a group is moved. The zero value moves it unless messages
// would be skipped.
type SeekOptions struct {
	// DryRun changes nothing, locks nothing, and returns what would happen.
	DryRun bool
	// AllowSkip skips messages that the group has not had. They are lost to it.
	// Needed as well when so many are undelivered that not all could be looked at
	// (SeekResult.Exact).
	AllowSkip bool
	// DropRetries removes the retries of the group that wait in deferred. Otherwise
	// they come when they are due, wherever the group is moved.
	DropRetries bool
	// Actor is who does it, for the log, at most MaxActorBytes. Defaults to the
	// database role. Reason is why, at most MaxReasonBytes.
	Actor  string
	Reason string
}

func (o SeekOptions) validate() error {
	return validateActor("SeekOptions", o.Actor, o.Reason)
}

// SeekResult is what a move means, by the stored position: what was acked since
// the last checkpoint counts as not delivered.
type SeekResult struct {
	// Again counts the messages that were delivered and come again, Skipped those
	// that were not and do not come. Those of one group alone are among them (its
	// retries and requeued dead letters), and the dead letters that are still
	// stored.
	Again   int64
	Skipped int64
	// Exact says that the two are not only a part: no more than MaxGroupCount
	// messages had to be looked at for each.
	Exact bool
	// Retries is how many retries wait in deferred.
	Retries int64
	// Holders are the processes that have the topic or shards of it.
	Holders []string
}

// Seek moves a consumer group in a topic: back, to have messages again that are
// still stored (a new projection from the history, a handler that was wrong), or
// forward, to skip some. All shards are moved, in one transaction, and the entry in
// the log is in it (GroupLog). What was in flight counts for nothing, neither does
// an ack that comes later: no checkpoint can overwrite the new position.
//
// It may be called from any process, with subscribers at work. The one that has
// the topic notices with its next checkpoint, or within a third of
// ConsumerConfig.Lease when it stores none; until then it may deliver on from the
// old position. Then its messages' contexts end with ErrLeaseLost and it goes on
// from the new one. A change of the number of shards that is under way ends: the
// old shards go, and the new ones begin at the new position.
//
// Handlers that remember what they have done (the table inbox) recognise what
// comes again.
//
// With SeekOptions.DryRun it only returns what would happen. The counts look at
// MaxGroupCount messages of each kind. The group must have subscribed to the
// topic, else it is ErrUnknownGroup; see ErrWouldSkip and ErrNoSuchPosition, with
// which the result is returned as well. The context bounds it, and if that has no
// deadline ConsumerConfig.QueryTimeout. It may be called concurrently.
func (c *Consumer) Seek(ctx context.Context, group, topic string, to SeekTo, options SeekOptions) (SeekResult, error) {
	if err := ValidateTopic(topic); err != nil {
		return SeekResult{}, err
	}
	return c.seek(ctx, cursor.Topic{Group: group, Topic: topic}, to, options)
}

// SeekBatches is Seek for the position that a group has in many topics, see
// SubscribeBatches. Each of them is moved.
func (c *Consumer) SeekBatches(ctx context.Context, group string, to SeekTo, options SeekOptions) (SeekResult, error) {
	return c.seek(ctx, cursor.Topic{Group: group}, to, options)
}

func (c *Consumer) seek(ctx context.Context, topic cursor.Topic, to SeekTo, options SeekOptions) (SeekResult, error) {
	for _, check := range []func() error{func() error { return validateGroup(topic.Group) }, to.validate, options.validate} {
		if err := check(); err != nil {
			return SeekResult{}, err
		}
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	groups := cursor.NewGroups(c.config.Schema)
	seek := cursor.Seek{
		Topic: topic, To: to.to, Count: MaxGroupCount, Skip: options.AllowSkip, Retries: options.DropRetries,
		Actor: cursor.Actor{Name: options.Actor, Reason: options.Reason},
	}
	var sought cursor.Sought
	var err error
	if options.DryRun {
		sought, err = groups.Preview(ctx, c.db, seek)
	} else {
		sought, err = groups.Seek(ctx, c.db, seek)
	}
	result := SeekResult{Again: sought.Again, Skipped: sought.Skipped, Exact: sought.Exact, Retries: sought.Retries, Holders: sought.Holders}
	switch {
	case errors.Is(err, cursor.ErrUnknown):
		return SeekResult{}, fmt.Errorf("%w: %s", ErrUnknownGroup, topic)
	case errors.Is(err, cursor.ErrBeyond):
		return result, fmt.Errorf("%w: id %d, the last one drawn is %d", ErrNoSuchPosition, to.to.ID, sought.Top)
	case errors.Is(err, cursor.ErrNoEra):
		return result, fmt.Errorf("%w: era %d", ErrNoSuchPosition, to.to.Era)
	case errors.Is(err, cursor.ErrSkips):
		atLeast := ""
		if !sought.Exact {
			atLeast = "at least "
		}
		return result, fmt.Errorf("%w: %s, %s%d: set SeekOptions.AllowSkip if that is meant", ErrWouldSkip, topic, atLeast, sought.Skipped)
	case err != nil:
		return SeekResult{}, fmt.Errorf("outbox: seek: %w", explain(err, c.config.Schema))
	}
	if !options.DryRun {
		c.leases.LookAt(topic)
	}
	return result, nil
}

// bounded gives a context without a deadline the time limit of a statement.
func (c *Consumer) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.config.QueryTimeout)
}

func validateGroup(group string) error {
	if group == "" {
		return errors.New("outbox: group is empty")
	}
	if problem := textProblem(group, MaxConsumerGroupBytes); problem != "" {
		return fmt.Errorf("outbox: group %s", problem)
	}
	return nil
}

func validateActor(options, actor, reason string) error {
	if problem := textProblem(actor, MaxActorBytes); problem != "" {
		return fmt.Errorf("outbox: %s.Actor %s", options, problem)
	}
	return validateReason(options+".Reason", reason)
}
