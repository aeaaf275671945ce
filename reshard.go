package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/millrace/watermill-outbox/internal/cursor"
)

// Reshard asks for another number of shards of a topic for a consumer group,
// between 1 and MaxShards. It returns when the wish is stored; the subscribers
// carry it out, whether this Consumer has any or not:
//
// Each finishes its message in flight and hands its shards back. When no living
// process has one the division changes, at one snapshot of the database for all:
// what was committed by then is still delivered from the old shards, which end
// there, and the rest from the new ones when all old ones are through. So nothing
// is lost or repeated, and a key's order stands; new messages wait meanwhile. With
// nobody subscribed it happens when somebody does. Status shows the shards, and
// which are ending.
//
// A later call replaces a wish that was not carried out yet, and the present
// number takes it back. It may be called concurrently; the context bounds its few
// statements, as does ConsumerConfig.QueryTimeout. The group "" is
// DefaultConsumerGroup; one that never subscribed to the topic is
// ErrUnknownGroup. SubscriberConfig.Shards has no part in it.
func (c *Consumer) Reshard(ctx context.Context, group, topic string, shards int) error {
	if err := ValidateTopic(topic); err != nil {
		return err
	}
	return c.reshard(ctx, cursor.Topic{Group: group, Topic: topic}, shards)
}

// ReshardBatches is Reshard for the topics that a consumer group reads together,
// by Subscriber.SubscribeBatches: whatever they are, for a group has one such
// selection. One that never subscribed so is ErrUnknownGroup.
func (c *Consumer) ReshardBatches(ctx context.Context, group string, shards int) error {
	return c.reshard(ctx, cursor.Topic{Group: group}, shards)
}

func (c *Consumer) reshard(ctx context.Context, of cursor.Topic, shards int) error {
	if shards < 1 || shards > MaxShards {
		return fmt.Errorf("outbox: Reshard: shards must be between 1 and %d, is %d", MaxShards, shards)
	}
	of.Group = cmp.Or(of.Group, DefaultConsumerGroup)
	ctx, cancel := context.WithTimeout(ctx, c.config.QueryTimeout)
	defer cancel()
	err := c.store.Reshard(ctx, c.db, of, shards)
	switch {
	case errors.Is(err, cursor.ErrUnknown):
		return fmt.Errorf("%w: %s", ErrUnknownGroup, of)
	case err != nil:
		return fmt.Errorf("outbox: reshard %s: %w", of, explain(err, c.config.Schema))
	}
	c.leases.LookAt(of)
	return nil
}
