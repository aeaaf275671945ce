package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	outbox "github.com/millrace/watermill-outbox"
)

// outageErrors is how often the relay fails before the broker comes back: twice all
// that Retry does, and once more, so that the Subscriber has to deliver again.
const outageErrors = 2*(1+maxRetries) + 1

// order is a version of an order.
type order struct{ id, version int }

// oversized is more than the stream takes.
var oversized = order{id: 3, version: 7}

// message returns the order's message.
func (o order) message(ctx context.Context) *message.Message {
	text := fmt.Sprintf("%d %d ", o.id, o.version)
	if o == oversized {
		text += strings.Repeat("x", 2*maxSize)
	}
	msg := message.NewMessageWithContext(ctx, watermill.NewUUID(), []byte(text))
	msg.Metadata.Set(outbox.DefaultKeyMetadata, strconv.Itoa(o.id))
	return msg
}

// parseOrder is the reverse of message.
func parseOrder(payload []byte) (o order, err error) {
	_, err = fmt.Sscan(string(payload), &o.id, &o.version)
	return o, err
}

// outage is a broker that can go down and come back.
type outage interface {
	stop()
	start() error
}

// book makes the outage happen and counts.
type book struct {
	broker outage
	out    io.Writer
	// complete is closed when all messages are in the stream or the poison topic, or
	// the broker did not come back.
	complete chan struct{}

	mu        sync.Mutex
	total     int
	confirmed int
	down      bool
	errors    int // while down
	poisoned  map[order]int
	err       error
}

func newBook(total int, b outage, out io.Writer) *book {
	return &book{broker: b, out: out, complete: make(chan struct{}), total: total, poisoned: map[order]int{}}
}

// before is called before each message is published. Half-way the broker goes down.
func (b *book) before() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.confirmed == b.total/2 && b.errors == 0 && !b.down {
		fmt.Fprintf(b.out, "  %d are in the stream; the broker goes down\n", b.confirmed)
		b.broker.stop()
		b.down = true
	}
}

// after is called with what came of it.
func (b *book) after(msg *message.Message, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		b.confirmed++
		b.check()
		return
	}
	if !b.down {
		// The oversized one, or the connection is not back yet.
		return
	}
	b.errors++
	fmt.Fprintf(b.out, "  failure %d of message %s: %s\n", b.errors, msg.UUID[:8], err)
	if b.errors == outageErrors {
		b.down = false
		if b.err = b.broker.start(); b.err != nil {
			b.finish()
		}
		fmt.Fprintln(b.out, "  the broker is back")
	}
}

// poison is the handler of the poison topic.
func (b *book) poison(msg *message.Message) error {
	o, err := parseOrder(msg.Payload)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	fmt.Fprintf(b.out, "  version %d of order %d is in the poison topic: %s\n", o.version, o.id, msg.Metadata.Get(middleware.ReasonForPoisonedKey))
	b.poisoned[o]++
	b.check()
	return nil
}

// check closes complete when everything is through. The caller holds mu.
func (b *book) check() {
	if b.confirmed+len(b.poisoned) >= b.total {
		b.finish()
	}
}

// finish closes complete, once. The caller holds mu.
func (b *book) finish() {
	select {
	case <-b.complete:
	default:
		close(b.complete)
	}
}

// failure returns the error with which the broker did not come back.
func (b *book) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// compare returns what the stream has of what was published.
func (b *book) compare(published, stored []order) result {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := result{published: len(published), inStream: len(stored), outageErrors: b.errors, poisoned: len(b.poisoned)}
	seen := map[order]bool{}
	newest := map[int]int{}
	for _, o := range stored {
		switch {
		case seen[o]:
			r.repeated++
		case o.version < newest[o.id]:
			r.outOfOrder++
		}
		seen[o] = true
		newest[o.id] = max(newest[o.id], o.version)
	}
	for _, o := range published {
		if !seen[o] && b.poisoned[o] == 0 {
			r.lost++
		}
	}
	for _, n := range b.poisoned {
		r.poisonedAgain += n - 1
	}
	return r
}

// result is the outcome.
type result struct {
	published, inStream, lost, repeated, outOfOrder, outageErrors, poisoned, poisonedAgain int
}

// ok reports whether each message is in the stream once and in order, apart from the
// one that is in the poison topic, although there was an outage.
func (r result) ok() bool {
	return r.published == orders*versions && r.inStream == r.published-1 && r.lost == 0 && r.repeated == 0 &&
		r.outOfOrder == 0 && r.outageErrors == outageErrors && r.poisoned == 1 && r.poisonedAgain == 0
}

// String is the last line that the program prints.
func (r result) String() string {
	return fmt.Sprintf("published=%d in_stream=%d lost=%d repeated=%d out_of_order=%d outage_errors=%d poisoned=%d poisoned_again=%d",
		r.published, r.inStream, r.lost, r.repeated, r.outOfOrder, r.outageErrors, r.poisoned, r.poisonedAgain)
}
