package outbox

import (
	"context"
	"time"

	"github.com/millrace/watermill-outbox/internal/window"
)

// Delivery is what is known of a message beside its content. It is in the
// message's context, not in its metadata, which would travel on to brokers.
type Delivery struct {
	// ID and Era together identify the stored message among all that are; a
	// handler may use them to recognise a repeated delivery, which UUIDs do
	// not allow, since they may repeat. Only a server that lost commits, in a
	// failover to a standby that lagged or a crash with synchronous_commit
	// off, issues the id of a lost message again.
	ID  int64
	Era int64
	// OrderingKey is the key it was published with, "" if none.
	OrderingKey string
	// PublishedAt is when the message was written, by the database's clock
	// (not when its transaction committed).
	PublishedAt time.Time
	// Attempt counts the deliveries of the message to this group, from 1: those
	// that failed, in whatever process, and this one. A delivery that was cut
	// off by a shutdown, a lost lease or a crash counts only if it is known to
	// have ended its process.
	Attempt int
	// Topic is the message's, ConsumerGroup the subscription's.
	Topic         string
	ConsumerGroup string
}

type deliveryKey struct{}

// DeliveryFromCtx returns what is known of a message that a Subscriber handed
// out, from the message's context.
func DeliveryFromCtx(ctx context.Context) (Delivery, bool) {
	if c, ok := ctx.(*deliveryContext); ok {
		return c.delivery(), true // as it was handed out: nothing is allocated
	}
	d, ok := ctx.Value(deliveryKey{}).(Delivery)
	return d, ok
}

// deliveryContext carries the row and makes a Delivery of it only when somebody
// asks.
type deliveryContext struct {
	context.Context //nolint:containedctx // is a context

	row     *window.Row
	attempt int
	group   string
	note    errorNote
}

func (c *deliveryContext) Value(key any) any {
	if key == (deliveryKey{}) {
		return c.delivery()
	}
	if key == (errorNoteKey{}) {
		return &c.note
	}
	return c.Context.Value(key)
}

func (c *deliveryContext) delivery() Delivery {
	return Delivery{
		ID: c.row.ID, Era: c.row.Era, OrderingKey: c.row.Key, PublishedAt: c.row.CreatedAt,
		Attempt: c.attempt, Topic: c.row.Topic, ConsumerGroup: c.group,
	}
}
