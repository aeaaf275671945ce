package outbox

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/millrace/watermill-outbox/internal/cursor"
)

const (
	// DefaultGroupPage is how many entries Consumer.Groups and GroupLog return unless
	// a limit says otherwise, MaxGroupPage the most that it may be.
	DefaultGroupPage = 100
	MaxGroupPage     = 1000
	// DefaultLagCount is how many undelivered messages are counted of each cursor
	// unless GroupFilter.Count says otherwise.
	DefaultLagCount = 1000
)

// GroupFilter chooses what Groups returns. The zero value is the first page of
// everything.
type GroupFilter struct {
	// ConsumerGroup and Topic, if not "", are the only ones.
	ConsumerGroup string
	Topic         string
	// AfterGroup and AfterTopic are those of the last entry of the page before.
	AfterGroup string
	AfterTopic string
	// Limit is how many entries the page has at most, up to MaxGroupPage. Defaults to
	// DefaultGroupPage.
	Limit int
	// Count is how many messages are counted of each cursor, and in each of a few
	// ranges that it has not had; more cost more. At most MaxGroupCount. Defaults to
	// DefaultLagCount.
	Count int
}

func (f GroupFilter) validate() error {
	for _, field := range []struct {
		name, value string
		limit       int
	}{
		{"ConsumerGroup", f.ConsumerGroup, MaxConsumerGroupBytes},
		{"AfterGroup", f.AfterGroup, MaxConsumerGroupBytes},
		{"Topic", f.Topic, MaxTopicBytes},
		{"AfterTopic", f.AfterTopic, MaxTopicBytes},
	} {
		if problem := textProblem(field.value, field.limit); problem != "" {
			return fmt.Errorf("outbox: GroupFilter.%s %s", field.name, problem)
		}
	}
	switch {
	case f.Limit < 0 || f.Limit > MaxGroupPage:
		return fmt.Errorf("outbox: GroupFilter.Limit must be between 0 and %d, is %d", MaxGroupPage, f.Limit)
	case f.Count < 0 || f.Count > MaxGroupCount:
		return fmt.Errorf("outbox: GroupFilter.Count must be between 0 and %d, is %d", MaxGroupCount, f.Count)
	}
	return nil
}

// GroupStatus says how far a consumer group is in a topic, by what is stored: a
// checkpoint old (ConsumerConfig.CheckpointInterval) while it is delivered to.
type GroupStatus struct {
	ConsumerGroup string
	// Topic is "" for the position in many topics, and Patterns are then theirs, as
	// those of SQL's LIKE.
	Topic    string
	Patterns []string
	// Lag is how many committed messages the group has not been handed out, Unacked
	// how many it was and has not acked. LagExact says that Lag is not only a part:
	// see GroupFilter.Count.
	Lag      int64
	LagExact bool
	Unacked  int64
	// Oldest is when the oldest of both was published, the zero time if there is
	// none, and Behind for how long it has been there, by the server's clock. What
	// was not counted is not among them, so there may be an older one when Lag is
	// not exact.
	Oldest time.Time
	Behind time.Duration
	// StoredAt is when a position was last stored.
	StoredAt time.Time
	// Resharding says that the number of shards is being changed.
	Resharding bool
	// Shards are the positions, one where the topic is not divided.
	Shards []GroupShard
}

// GroupShard is one position of a group in a topic.
type GroupShard struct {
	// Shard is its number, as in ShardStatus.
	Shard    int
	Lag      int64
	LagExact bool
	Unacked  int64
	// Holder is the process that has it, "" if none does, Host and PID say which
	// that is, and Silent how long ago its last sign of life was. It is dead when
	// that is longer than ConsumerConfig.Lease, and then others take over, if there
	// are any.
	Holder string
	Host   string
	PID    int
	Silent time.Duration
}

// Groups returns how far consumer groups are, by group and topic, in one statement
// that takes no locks: where they are, what they have not had, and who has them.
// The next page comes after the last entry of this one (GroupFilter). It is
// bounded as Seek is, and may be called concurrently.
func (c *Consumer) Groups(ctx context.Context, filter GroupFilter) ([]GroupStatus, error) {
	if err := filter.validate(); err != nil {
		return nil, err
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	rows, err := cursor.NewGroups(c.config.Schema).List(ctx, c.db, cursor.Page{
		Group: filter.ConsumerGroup, All: filter.Topic == "", Topic: filter.Topic,
		After: cursor.Topic{Group: filter.AfterGroup, Topic: filter.AfterTopic},
		Limit: cmp.Or(filter.Limit, DefaultGroupPage), Count: int64(cmp.Or(filter.Count, DefaultLagCount)),
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: groups: %w", explain(err, c.config.Schema))
	}
	list := []GroupStatus{}
	for _, row := range rows {
		last := len(list) - 1
		if last < 0 || list[last].ConsumerGroup != row.Key.Group || list[last].Topic != row.Key.Topic {
			list = append(list, GroupStatus{ConsumerGroup: row.Key.Group, Topic: row.Key.Topic, Patterns: row.Patterns, LagExact: true})
			last++
		}
		list[last].add(row)
	}
	return list, nil
}

// add puts one position to the others.
func (g *GroupStatus) add(row cursor.Standing) {
	shard := GroupShard{
		Shard: row.Key.Shard, Lag: row.Left, LagExact: row.Exact, Unacked: row.Holes, Holder: row.Holder, Host: row.Host, PID: row.PID,
	}
	if row.Beat != nil {
		shard.Silent = max(0, row.Now.Sub(*row.Beat))
	}
	g.Shards = append(g.Shards, shard)
	g.Lag += row.Left
	g.Unacked += row.Holes
	g.LagExact = g.LagExact && row.Exact
	g.Resharding = g.Resharding || row.Changing
	if row.Updated.After(g.StoredAt) {
		g.StoredAt = row.Updated
	}
	if row.Oldest != nil && (g.Oldest.IsZero() || row.Oldest.Before(g.Oldest)) {
		g.Oldest, g.Behind = *row.Oldest, max(0, row.Now.Sub(*row.Oldest))
	}
}

// GroupAction is what was done to a group.
type GroupAction string

// What GroupEvent.Action may be.
const (
	GroupMoved   GroupAction = "moved"
	GroupDropped GroupAction = "dropped"
)

// GroupEvent is an entry of the log of what was done to groups.
type GroupEvent struct {
	ID            int64
	At            time.Time
	Action        GroupAction
	Actor         string
	Reason        string
	ConsumerGroup string
	// Topic is "" for the position in many topics.
	Topic string
	// Detail is a JSON object: for a move where to, what it meant, and the first of
	// the positions that were.
	Detail []byte
}

// GroupLog returns what was done to a group, or for "" to any, by Seek and
// DropGroup: entries behind the id after, by ascending id, at most limit, which
// defaults to DefaultGroupPage. It is bounded as Seek is.
func (c *Consumer) GroupLog(ctx context.Context, group string, after int64, limit int) ([]GroupEvent, error) {
	if problem := textProblem(group, MaxConsumerGroupBytes); problem != "" {
		return nil, fmt.Errorf("outbox: group %s", problem)
	}
	if after < 0 || limit < 0 || limit > MaxGroupPage {
		return nil, fmt.Errorf("outbox: GroupLog needs an id of at least 0, and a limit between 0 and %d, has %d and %d", MaxGroupPage, after, limit)
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	found, err := cursor.NewGroups(c.config.Schema).Log(ctx, c.db, group, after, cmp.Or(limit, DefaultGroupPage))
	if err != nil {
		return nil, fmt.Errorf("outbox: %w", explain(err, c.config.Schema))
	}
	events := []GroupEvent{}
	for _, e := range found {
		events = append(events, GroupEvent{
			ID: e.ID, At: e.At, Action: GroupAction(e.Action), Actor: e.Actor.Name, Reason: e.Actor.Reason,
			ConsumerGroup: e.Topic.Group, Topic: e.Topic.Topic, Detail: e.Detail,
		})
	}
	return events, nil
}
