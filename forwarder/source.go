package forwarder

import (
	"context"
	"strconv"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Source is where messages come from: made by FromOutbox, FromSubscriber, or
// FromSubscribers.
type Source interface {
	// validate reports what is wrong, given what else is configured. It runs no
	// SQL.
	validate(config Config) error
	// open returns what one destination reads. It runs no SQL.
	open(settings settings, logger watermill.LoggerAdapter) (feed, error)
}

// settings are what a feed needs to know of the forwarder.
type settings struct {
	Config

	destination Destination
}

// feed hands out the messages for one destination. Its messages come in batches
// of one line, in order.
type feed interface {
	subscribe(ctx context.Context) (<-chan []*message.Message, error)
	// origin says where a message comes from.
	origin(msg *message.Message) origin
	// fail says that a message has spent an attempt, or with permanent that it is
	// to be given up. It reports whether the feed sees to that, and then hands out
	// the rest of the batch behind it again; otherwise it is the caller's.
	fail(c *consumed, err error, permanent bool) bool
	// again gives back a message that fails without spending an attempt, to be handed
	// out again with what stands behind it by then. It reports whether the feed can.
	again(c *consumed, err error) bool
	// leave gives back a message of which nothing became, and which did not fail:
	// it is behind one that did, its context has ended, or the subscription has.
	leave(c *consumed)
	// close ends the subscription, if its context has not, and returns when all is
	// given back. What is out has the forwarder's CloseTimeout.
	close() error
}

// origin is what is known of a message beside its content.
type origin struct {
	topic, key string
	// era and number are what no other message of the source has, 0 if they are
	// not known.
	era, number int64
	// attempt counts the deliveries, from 1; 0 if they are not counted.
	attempt int
}

// id returns an id that no other message of the source has, "" if none is known.
func (o origin) id() string {
	if o.number == 0 {
		return ""
	}
	return strconv.FormatInt(o.era, 10) + "-" + strconv.FormatInt(o.number, 10)
}
