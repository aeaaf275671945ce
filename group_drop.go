package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/millrace/watermill-outbox/internal/cursor"
)

var (
	// ErrGroupSubscribed is matched by *GroupSubscribedError.
	ErrGroupSubscribed = errors.New("outbox: a process is subscribed")

	// ErrGroupRemoved is the SubscriptionStatus.Err of a subscription whose group was
	// removed (DropGroup) while it had the topic. Nothing is delivered to it until
	// somebody subscribes again, which begins anew at SubscriberConfig.StartFrom.
	ErrGroupRemoved = errors.New("outbox: the consumer group was removed: subscribe again to begin anew")
)

// GroupSubscribedError is returned by DropGroup when living processes are
// subscribed. Nothing was removed. Close their subscribers, or wait for
// ConsumerConfig.Lease if they have died, or set DropOptions.Force. It matches
// ErrGroupSubscribed.
type GroupSubscribedError struct {
	ConsumerGroup string
	Members       []GroupMember
}

// GroupMember is a living process with a subscription of a group.
type GroupMember struct {
	// Holder is the process's name in the tables, Host and PID say which it is.
	Holder string
	Host   string
	PID    int
	// Topic is "" for many, see SubscribeBatches.
	Topic string
}

// Error implements error.
func (e *GroupSubscribedError) Error() string {
	var who []string
	for _, m := range e.Members[:min(len(e.Members), 3)] {
		who = append(who, fmt.Sprintf("topic %q by process %d on %q (%s)", m.Topic, m.PID, m.Host, m.Holder))
	}
	if more := len(e.Members) - len(who); more > 0 {
		who = append(who, fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("%s: group %q, %s: close its subscribers, or set DropOptions.Force",
		ErrGroupSubscribed, e.ConsumerGroup, strings.Join(who, ", "))
}

// Is reports whether target is ErrGroupSubscribed.
func (e *GroupSubscribedError) Is(target error) bool { return target == ErrGroupSubscribed }

// DropOptions say what of a group is removed. The zero value means all topics, and
// keeps the dead letters.
type DropOptions struct {
	// Topic, if not "", is the only one of which the group is removed.
	Topic string
	// Force removes although somebody is subscribed.
	Force bool
	// DeadLetters discards the group's dead letters, too, in batches that commit by
	// themselves, after the rest.
	DeadLetters bool
	// DryRun removes nothing and returns what there is.
	DryRun bool
	// Actor and Reason are as in SeekOptions.
	Actor  string
	Reason string
}

func (o DropOptions) validate() error {
	if o.Topic != "" {
		if err := ValidateTopic(o.Topic); err != nil {
			return err
		}
	}
	return validateActor("DropOptions", o.Actor, o.Reason)
}

// DropResult is what was removed.
type DropResult struct {
	// Topics counts those with a position (many topics of SubscribeBatches are one),
	// Cursors the positions, one for each shard, Retries what waited in deferred for
	// the group alone.
	Topics, Cursors, Retries int64
	DeadLetters              int
	// Members are the living processes that are subscribed, at most 100.
	Members []GroupMember
}

// DropGroup removes a consumer group, or its part in one topic: its positions, its
// retries in deferred, for a whole group what its handlers remember in inbox, and
// if asked for its dead letters. From then on it holds back nothing that is to be
// deleted. The messages stay for others. A group of that name that subscribes
// later is a new one; requeued messages and retries of the old one that are in the
// log already are then delivered to it, too, if it begins at the earliest.
//
// While a living process is subscribed it is refused, with a
// *GroupSubscribedError. A process that died counts as living for
// ConsumerConfig.Lease. One that subscribes at this very moment may not have been
// seen: its subscription shows ErrGroupRemoved then. With Force it is removed all the same: what is in flight
// runs to its end, and no ack or verdict of it is stored; the process notices with
// its next checkpoint, or within a third of ConsumerConfig.Lease, logs it and shows
// ErrGroupRemoved in its Status. It does not make the group again. Do not subscribe
// elsewhere before it has noticed, or two deliver at once for that time.
//
// A group without positions is ErrUnknownGroup; with DeadLetters it is enough that
// it has some. It is bounded as Seek is, and may be called concurrently.
func (c *Consumer) DropGroup(ctx context.Context, group string, options DropOptions) (DropResult, error) {
	if err := validateGroup(group); err != nil {
		return DropResult{}, err
	}
	if err := options.validate(); err != nil {
		return DropResult{}, err
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	groups := cursor.NewGroups(c.config.Schema)
	drop := cursor.Drop{
		Group: group, All: options.Topic == "", Topic: options.Topic, Force: options.Force, Beat: c.config.Lease,
		Actor: cursor.Actor{Name: options.Actor, Reason: options.Reason},
	}
	var dropped cursor.Dropped
	var err error
	if options.DryRun {
		dropped, err = groups.PreviewDrop(ctx, c.db, drop)
	} else {
		dropped, err = groups.Drop(ctx, c.db, drop)
	}
	result := DropResult{Topics: dropped.Topics, Cursors: dropped.Cursors, Retries: dropped.Retries}
	for _, m := range dropped.Subscribed {
		result.Members = append(result.Members, GroupMember(m))
	}
	unknown := errors.Is(err, cursor.ErrUnknown)
	switch {
	case errors.Is(err, cursor.ErrSubscribed):
		return result, &GroupSubscribedError{ConsumerGroup: group, Members: slices.Clone(result.Members)}
	case err != nil && !unknown:
		return DropResult{}, fmt.Errorf("outbox: drop group %q: %w", group, explain(err, c.config.Schema))
	}
	if options.DeadLetters {
		if result.DeadLetters, err = c.dropDeadLetters(ctx, group, options); err != nil {
			return result, fmt.Errorf("outbox: drop group %q: %w", group, err)
		}
	}
	if unknown && result.DeadLetters == 0 {
		return DropResult{}, fmt.Errorf("%w: group %q, topic %q", ErrUnknownGroup, group, options.Topic)
	}
	return result, nil
}

// dropDeadLetters discards the dead letters of a group, or counts them.
func (c *Consumer) dropDeadLetters(ctx context.Context, group string, options DropOptions) (int, error) {
	e, err := newExecutor(c.pool)
	if err != nil {
		return 0, err
	}
	letters := &DeadLetters{config: DeadLettersConfig{Schema: c.config.Schema, Actor: options.Actor}, db: e}
	filter := DeadLetterFilter{ConsumerGroup: group, Topic: options.Topic}
	if options.DryRun {
		return letters.Count(ctx, filter)
	}
	return letters.DiscardAll(ctx, filter, cmp.Or(options.Reason, "the group was removed"))
}
