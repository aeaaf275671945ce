package forwarder

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
)

// subscriberSource reads any Watermill Pub/Sub.
type subscriberSource struct {
	single bool
	make   func(destination string) (message.Subscriber, error)
	topics []string
}

// FromSubscriber reads these topics of any Subscriber, for one destination. The
// Forwarder closes it.
//
// Messages of one topic and ordering key (outbox.DefaultKeyMetadata) are forwarded
// one after the other, in the order in which the Subscriber hands them out; those
// without a key wait for none, so their order is the Subscriber's, if it hands out
// one at a time. One that fails is tried again in its place and never nacked; it
// counts attempts from the start of the process, and is given up to
// Destination.PoisonTopic; without one it is tried for ever, for there are no dead
// letters. What is left at the end is nacked after the subscription has ended.
func FromSubscriber(subscriber message.Subscriber, topics ...string) Source {
	return &subscriberSource{single: true, topics: topics, make: func(string) (message.Subscriber, error) { return subscriber, nil }}
}

// FromSubscribers is FromSubscriber for several destinations: open is called with
// the name of each by Run, and returns a Subscriber with progress of its own
// (another consumer group).
func FromSubscribers(open func(destination string) (message.Subscriber, error), topics ...string) Source {
	return &subscriberSource{make: open, topics: topics}
}

func (s *subscriberSource) validate(config Config) error {
	problem := ""
	switch {
	case s.make == nil:
		problem = "FromSubscribers needs a function"
	case len(s.topics) == 0:
		problem = "FromSubscriber and FromSubscribers need topics"
	case slices.Contains(s.topics, ""):
		problem = "FromSubscriber and FromSubscribers: a topic is empty"
	case len(slices.Compact(slices.Sorted(slices.Values(s.topics)))) < len(s.topics):
		problem = "FromSubscriber and FromSubscribers: a topic is there twice"
	case s.single && len(config.Destinations) > 1:
		problem = fmt.Sprintf("one Subscriber cannot serve %d destinations, each of which needs its own progress: use FromSubscribers", len(config.Destinations))
	}
	if s.single && problem == "" {
		if subscriber, err := s.make(""); err != nil || subscriber == nil {
			problem = "FromSubscriber needs a Subscriber"
		}
	}
	if problem != "" {
		return &ConfigError{Field: "Source", Problem: problem}
	}
	for _, d := range config.Destinations {
		if d.DeduplicationKey != "" && d.DeduplicateBy == ByStoredID {
			return &ConfigError{Destination: d.Name, Field: "DeduplicateBy", Problem: "only the outbox has stored ids: use ByUUID, if UUIDs are unique"}
		}
	}
	return nil
}

func (s *subscriberSource) open(of settings, _ watermill.LoggerAdapter) (feed, error) {
	subscriber, err := s.make(of.destination.Name)
	switch {
	case err != nil:
		return nil, fmt.Errorf("forwarder: subscriber of destination %q: %w", of.destination.Name, err)
	case subscriber == nil:
		return nil, fmt.Errorf("forwarder: subscriber of destination %q: FromSubscribers' function returned none", of.destination.Name)
	}
	f := &subscriberFeed{
		subscriber: subscriber, topics: s.topics, closeTimeout: of.CloseTimeout,
		inFlight: make(chan struct{}, of.destination.MaxInFlight),
		lines:    map[[2]string]*handed{}, out: map[*message.Message]*handed{},
	}
	return f, nil
}

// subscriberFeed puts the messages of a Subscriber into lines.
type subscriberFeed struct {
	subscriber   message.Subscriber
	topics       []string
	closeTimeout time.Duration
	// inFlight holds a value for each message that is out, or waits in its line.
	inFlight chan struct{}
	// over is the context of the subscriptions. It ends later than nothing more is to
	// be handed out, since many Subscribers end the contexts of their messages then,
	// and a Nack before counts with some as a failure.
	over context.Context //nolint:containedctx // the feed's own lifetime
	end  context.CancelFunc

	mu sync.Mutex
	// lines has the last message of each line; the next waits for it.
	lines map[[2]string]*handed
	// out are the messages that are handed out.
	out map[*message.Message]*handed
}

// handed is a message on its way.
type handed struct {
	*message.Message

	ctx    context.Context //nolint:containedctx // of the message
	origin origin
	// before is in front of it in its line, nil if nothing is.
	before *handed
	// left is closed when nothing became of it, done when the next of its line may
	// go.
	left, done chan struct{}
}

func (f *subscriberFeed) subscribe(ctx context.Context) (<-chan []*message.Message, error) {
	f.over, f.end = context.WithCancel(context.WithoutCancel(ctx))
	hurry := context.AfterFunc(ctx, f.end)
	defer hurry()
	out := make(chan []*message.Message)
	var running sync.WaitGroup
	for _, topic := range f.topics {
		messages, err := f.subscriber.Subscribe(f.over, topic)
		if err != nil {
			return nil, fmt.Errorf("forwarder: subscribe to topic %q: %w", topic, err)
		}
		running.Go(func() { f.read(ctx, topic, messages, out) })
	}
	go func() {
		running.Wait()
		close(out)
	}()
	return out, nil
}

// read hands on the messages of a topic until the Subscriber's channel ends. When
// the context has ended, what is not taken goes back to the Subscriber.
func (f *subscriberFeed) read(ctx context.Context, topic string, messages <-chan *message.Message, out chan<- []*message.Message) {
	var running sync.WaitGroup
	defer running.Wait()
	for msg := range messages {
		h := &handed{Message: msg, ctx: msg.Context(), left: make(chan struct{}), done: make(chan struct{})}
		select {
		case f.inFlight <- struct{}{}:
		case <-h.ctx.Done(): // it is not ours any more
			msg.Nack()
			continue
		case <-ctx.Done():
			f.giveBack(h)
			continue
		}
		f.queue(topic, h)
		running.Go(func() {
			if !f.hand(ctx, h, out) {
				f.giveBack(h)
			}
		})
	}
}

// hand hands out a message when its turn in its line has come, waits for what
// becomes of it, and reports whether it was acked.
func (f *subscriberFeed) hand(ctx context.Context, h *handed, out chan<- []*message.Message) (acked bool) {
	defer func() { <-f.inFlight }()
	defer f.unqueue(h)
	if h.before != nil {
		<-h.before.done // whatever becomes of this one: the next waits for it alone
	}
	if ctx.Err() != nil {
		return false // as the one before may have been, or this one would overtake it
	}
	select {
	case out <- []*message.Message{h.Message}:
	case <-h.ctx.Done():
		return false
	case <-ctx.Done():
		return false
	}
	select {
	case <-h.Acked():
		return true
	case <-h.left:
		return false
	}
}

// giveBack nacks a message when that does not count.
func (f *subscriberFeed) giveBack(h *handed) {
	select {
	case <-f.over.Done():
	case <-h.ctx.Done():
	}
	h.Nack()
}

// queue puts a message at the end of its line.
func (f *subscriberFeed) queue(topic string, h *handed) {
	h.origin = origin{topic: topic, key: h.Metadata.Get(outbox.DefaultKeyMetadata)}
	if d, ok := outbox.DeliveryFromCtx(h.ctx); ok {
		h.origin.key = d.OrderingKey
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.out[h.Message] = h
	if h.origin.key != "" {
		line := [2]string{topic, h.origin.key}
		h.before = f.lines[line]
		f.lines[line] = h
	}
}

func (f *subscriberFeed) unqueue(h *handed) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.out, h.Message)
	if line := [2]string{h.origin.topic, h.origin.key}; f.lines[line] == h {
		delete(f.lines, line)
	}
	h.before = nil // which would keep all that ever were in its line
	close(h.done)
}

func (f *subscriberFeed) handed(msg *message.Message) *handed {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.out[msg]
}

func (f *subscriberFeed) origin(msg *message.Message) origin { return f.handed(msg).origin }

// fail leaves the message to the caller, who tries again: what a Nack leads to is
// different with each Pub/Sub, and may break the order.
func (f *subscriberFeed) fail(*consumed, error, bool) bool { return false }

// again cannot be done either. There is nothing behind a message: it is handed out
// when the one before it is done.
func (f *subscriberFeed) again(*consumed, error) bool { return false }

func (f *subscriberFeed) leave(c *consumed) { close(f.handed(c.Message).left) }

// close waits until nothing is out, then ends the subscriptions.
func (f *subscriberFeed) close() error {
	timer := time.NewTimer(f.closeTimeout)
	defer timer.Stop()
	for range cap(f.inFlight) {
		select {
		case f.inFlight <- struct{}{}:
			continue
		case <-timer.C:
		}
		break
	}
	f.end()
	return f.subscriber.Close()
}
