package forwarder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	// DefaultMaxAttempts is how often a message is tried that fails by its own
	// fault.
	DefaultMaxAttempts = 10
	// DefaultBatchSize is how many messages of a line are taken at once.
	DefaultBatchSize = 16
	// DefaultCloseTimeout is how long Close waits for publishers.
	DefaultCloseTimeout = 5 * time.Second

	// endTimeout bounds, beside CloseTimeout, what the end waits for: that sources
	// store where they are and close.
	endTimeout = 10 * time.Second
	// returnTimeout is how long a publisher may take to notice that the contexts of
	// its messages have ended.
	returnTimeout = time.Second

	// maxInFlight bounds the lines and the messages of a line that are in flight.
	maxInFlight = 10_000
)

// Config configures a Forwarder. Source and Destinations are needed.
type Config struct {
	// Source is where messages come from.
	Source Source

	// Destinations are where they go, at least one.
	Destinations []Destination

	// Route returns where a message goes; topic is the one it comes from. Without
	// one every destination gets every message. A message without a target is done.
	// It is called, concurrently, once for each destination, with what the
	// Middlewares made of the message, and must return the same each time. An
	// error, an unknown destination, or an impossible topic makes a dead letter of
	// the message: no destination gets it.
	Route func(msg *message.Message, topic string) ([]Target, error)

	// Middlewares run around each message, for each destination, the first one
	// outermost; what they return is published when all have returned, as with a
	// Router. They may filter, transform, throttle, and so on; an error is an attempt
	// of the message that failed. They run again when the message comes again.
	// There is no Router, so its values are not in the message's context.
	Middlewares []message.HandlerMiddleware

	// UnwrapTopic, unless "", is a source topic whose messages are in the envelope
	// of Watermill's own forwarder component, as existing code publishes them. They
	// are unwrapped, and come from the topic that the envelope says.
	UnwrapTopic string

	// MaxAttempts is how often a message is tried that fails by its own fault before
	// it is given up, to the outbox's dead letters or Destination.PoisonTopic. What
	// fails because a destination is down does not count. Negative means for ever:
	// the message holds up its line. Defaults to DefaultMaxAttempts.
	MaxAttempts int

	// BatchSize is how many messages of a line (of one topic and ordering key) are
	// taken from the outbox at once. With Destination.MaxInFlight it bounds what is
	// in memory and not yet published, and so what is repeated after a crash.
	// Defaults to DefaultBatchSize.
	BatchSize int

	// CloseTimeout is how long the end of the Forwarder waits for publishers that
	// are at it; what they publish in that time is not repeated. Defaults to
	// DefaultCloseTimeout.
	CloseTimeout time.Duration
}

func (c Config) withDefaults() Config {
	c.MaxAttempts = cmp.Or(c.MaxAttempts, DefaultMaxAttempts)
	c.BatchSize = cmp.Or(c.BatchSize, DefaultBatchSize)
	c.CloseTimeout = cmp.Or(c.CloseTimeout, DefaultCloseTimeout)
	c.Destinations = slices.Clone(c.Destinations)
	for i := range c.Destinations {
		c.Destinations[i] = c.Destinations[i].withDefaults()
	}
	return c
}

func (c Config) validate() error {
	wrong := func(field, format string, args ...any) error {
		return &ConfigError{Field: field, Problem: fmt.Sprintf(format, args...)}
	}
	switch {
	case c.Source == nil:
		return wrong("Source", "is missing: use FromOutbox, FromSubscriber or FromSubscribers")
	case len(c.Destinations) == 0:
		return wrong("Destinations", "is empty")
	case c.BatchSize < 1 || c.BatchSize > maxInFlight:
		return wrong("BatchSize", "must be between 1 and %d, is %d", maxInFlight, c.BatchSize)
	case c.CloseTimeout < 0:
		return wrong("CloseTimeout", "must not be negative, is %s", c.CloseTimeout)
	case slices.ContainsFunc(c.Middlewares, func(m message.HandlerMiddleware) bool { return m == nil }):
		return wrong("Middlewares", "has a nil one")
	}
	names := map[string]bool{}
	for i := range c.Destinations {
		d := &c.Destinations[i]
		if err := d.validate(); err != nil {
			return err
		}
		if names[d.Name] {
			return &ConfigError{Destination: d.Name, Field: "Name", Problem: "two destinations have it: give each its own"}
		}
		names[d.Name] = true
	}
	return c.Source.validate(c)
}

// Forwarder publishes the messages of a source to destinations. See the package
// documentation for what it promises. Its methods are safe for concurrent use, and
// any number of Forwarders may run in a process.
type Forwarder struct {
	config Config
	logger watermill.LoggerAdapter
	pumps  []*pump

	running chan struct{}
	// ended is closed when nothing runs any more, or will.
	ended chan struct{}
	// closing ends when Run is to end.
	closing context.Context //nolint:containedctx // the Forwarder's own lifetime
	close   context.CancelFunc

	mu      sync.Mutex
	started bool
}

// New returns a Forwarder. It runs no SQL and calls no publisher. A nil logger
// means none.
func New(config Config, logger watermill.LoggerAdapter) (*Forwarder, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	f := &Forwarder{config: config, logger: logger, running: make(chan struct{}), ended: make(chan struct{})}
	f.closing, f.close = context.WithCancel(context.Background())
	destinations := map[string]*Destination{}
	for i := range config.Destinations {
		destinations[config.Destinations[i].Name] = &config.Destinations[i]
	}
	for _, d := range config.Destinations {
		p := &pump{
			settings: settings{Config: config, destination: d}, destinations: destinations, handle: chain(config.Middlewares),
			breaker: newBreaker(d.Failures, d.backoff(), d.patience()), logger: logger.With(watermill.LogFields{"destination": d.Name}),
			failing: map[string]*failure{},
		}
		p.working, p.halt = context.WithCancel(context.Background()) //nolint:fatcontext // one for each pump
		if batches, ok := d.Publisher.(BatchPublisher); ok {
			p.combiner = &combiner{publisher: batches, patience: d.patience(), mayBegin: p.mayBegin, deadline: p.deadline}
		}
		f.pumps = append(f.pumps, p)
	}
	return f, nil
}

// Run forwards until the context ends, Close is called, or the source has closed
// all its channels, and returns when the end is through: messages that are being
// published are waited for, for Config.CloseTimeout. It returns nil then, an error
// if the source cannot be subscribed to, ErrRunning and ErrClosed. A publisher that
// never returns keeps its goroutine, but not Run. Messages carry the context's
// values.
func (f *Forwarder) Run(ctx context.Context) error {
	f.mu.Lock()
	switch {
	case f.started:
		f.mu.Unlock()
		return ErrRunning
	case f.closing.Err() != nil:
		f.mu.Unlock()
		return ErrClosed
	}
	f.started = true
	f.mu.Unlock()
	defer close(f.ended)
	defer f.close()
	defer context.AfterFunc(ctx, f.close)()

	// The subscriptions end first: what is nacked after that does not count.
	subscribing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	unhook := context.AfterFunc(f.closing, cancel)
	var pumping sync.WaitGroup
	channels, err := f.subscribe(subscribing)
	unhook()
	switch {
	case err == nil:
		for i, p := range f.pumps {
			pumping.Go(func() { p.run(channels[i]) })
		}
		close(f.running)
		f.logger.Info("Forwarder runs", nil)
		select {
		case <-f.closing.Done():
		case <-ended(&pumping):
		}
	case f.closing.Err() != nil:
		err = nil // which may be why: the end came first
	}
	cancel()
	return errors.Join(err, f.stop(&pumping))
}

// ended returns a channel that is closed when the group has ended.
func ended(group *sync.WaitGroup) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		group.Wait()
		close(done)
	}()
	return done
}

// subscribe begins what the pumps read.
func (f *Forwarder) subscribe(ctx context.Context) ([]<-chan []*message.Message, error) {
	channels := make([]<-chan []*message.Message, len(f.pumps))
	for i, p := range f.pumps {
		var err error
		if p.feed, err = f.config.Source.open(p.settings, p.logger); err != nil {
			return nil, err
		}
		if channels[i], err = p.feed.subscribe(ctx); err != nil {
			return nil, err
		}
	}
	return channels, nil
}

// stop ends the pumps, whose subscriptions have ended, and closes what they read.
func (f *Forwarder) stop(pumping *sync.WaitGroup) error {
	for _, p := range f.pumps {
		p.halt()
	}
	var closing sync.WaitGroup
	closed := make(chan error, len(f.pumps))
	for _, p := range f.pumps {
		if p.feed != nil {
			closing.Go(func() {
				if err := recovered(p.feed.close); err != nil {
					closed <- fmt.Errorf("forwarder: close the source of destination %q: %w", p.destination.Name, err)
				}
			})
		}
	}
	through := waitFor(&closing, f.config.CloseTimeout+endTimeout)
	through = waitFor(pumping, returnTimeout) && through
	if through {
		f.logger.Info("Forwarder ended", nil)
	} else {
		f.logger.Info("Forwarder ended, and leaves a publisher or a subscriber that does not return", nil)
	}
	var errs []error
	for range len(closed) {
		errs = append(errs, <-closed)
	}
	return errors.Join(errs...)
}

// waitFor waits for the group, for so long, and reports whether it has ended.
func waitFor(group *sync.WaitGroup, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ended(group):
		return true
	case <-timer.C:
		return false
	}
}

// Running returns a channel that is closed when all destinations are subscribed.
func (f *Forwarder) Running() <-chan struct{} { return f.running }

// Close ends Run and waits until it is through. It may be called more than once,
// and before Run, which then returns ErrClosed. It always returns nil; Run returns
// the errors.
func (f *Forwarder) Close() error {
	f.close()
	f.mu.Lock()
	started := f.started
	f.mu.Unlock()
	if started {
		<-f.ended
	}
	return nil
}
