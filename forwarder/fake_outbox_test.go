package forwarder

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/delivery"
)

// row is a stored message.
type row struct {
	number     int64
	topic, key string
	uuid       string
	payload    string
	metadata   message.Metadata
}

// fakeOutbox is a source that keeps the rules of Subscriber.SubscribeBatches: lines
// in parallel, batches of one line, a failure counted and tried again in place, what
// is behind it withdrawn, dead letters. Each destination reads it with a position of
// its own. It ends when its context does, or, once it is sealed, when everything is
// settled.
type fakeOutbox struct {
	rows []row
	// pause is how long a message that failed waits.
	pause time.Duration
	// live keeps the channels open when everything is settled.
	live bool
	// refuse, if not nil, is what open returns for a destination.
	refuse func(destination string) error

	mu    sync.Mutex
	feeds map[string]*fakeFeed
}

func (s *fakeOutbox) validate(Config) error { return nil }

func (s *fakeOutbox) open(of settings, _ watermill.LoggerAdapter) (feed, error) {
	if s.refuse != nil {
		if err := s.refuse(of.destination.Name); err != nil {
			return nil, err
		}
	}
	f := s.feed(of.destination.Name)
	f.maxInFlight, f.batch, f.maxAttempts, f.grace = of.destination.MaxInFlight, of.BatchSize, of.MaxAttempts, of.CloseTimeout
	f.lease, f.lose = context.WithCancelCause(context.Background())
	return f, nil
}

// feed returns that of a destination, with what was settled before.
func (s *fakeOutbox) feed(destination string) *fakeFeed {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.feeds == nil {
		s.feeds = map[string]*fakeFeed{}
	}
	f := s.feeds[destination]
	if f == nil {
		f = &fakeFeed{source: s, changed: make(chan struct{}, 1), attempts: map[int64]int{}, acked: map[int64]bool{}, dead: map[int64]error{}, busy: map[string]bool{}, since: map[string]int{}}
		s.feeds[destination] = f
	}
	return f
}

// add stores another message.
func (s *fakeOutbox) add(r row) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rows = append(s.rows, r)
	for _, f := range s.feeds {
		f.wake()
	}
}

type fakeFeed struct {
	source             *fakeOutbox
	maxInFlight, batch int
	maxAttempts        int
	grace              time.Duration
	changed            chan struct{}
	lease              context.Context //nolint:containedctx // of one subscription
	lose               context.CancelCauseFunc
	running            sync.WaitGroup

	mu sync.Mutex
	// attempts counts those that failed.
	attempts map[int64]int
	acked    map[int64]bool
	dead     map[int64]error
	// busy are the lines that are in flight, or wait for a retry.
	busy map[string]bool
	// since says when the lines became ready: they take turns.
	since                map[string]int
	turns                int
	returned             int
	inFlight, mostAtOnce int
	closed               int

	// reasons has why messages failed.
	reasons sync.Map
}

type fakeRowKey struct{}

func (f *fakeFeed) wake() {
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

func (f *fakeFeed) subscribe(ctx context.Context) (<-chan []*message.Message, error) {
	out := make(chan []*message.Message)
	f.running.Go(func() {
		defer close(out)
		var handing sync.WaitGroup
		defer handing.Wait()
		for {
			rows, over := f.next()
			if over {
				return
			}
			if rows == nil {
				select {
				case <-f.changed:
					continue
				case <-ctx.Done():
				case <-f.lease.Done():
				}
				return
			}
			batch := make([]*message.Message, len(rows))
			cancels := make([]context.CancelCauseFunc, len(rows))
			for i, r := range rows {
				batch[i] = message.NewMessage(r.uuid, []byte(r.payload))
				for key, value := range r.metadata {
					batch[i].Metadata.Set(key, value)
				}
				var base context.Context
				base, cancels[i] = context.WithCancelCause(context.WithValue(context.WithoutCancel(ctx), fakeRowKey{}, r))
				batch[i].SetContext(base)
			}
			select {
			case out <- batch:
				handing.Go(func() { f.await(ctx, rows, batch, cancels) })
			case <-ctx.Done():
				return
			case <-f.lease.Done():
				return
			}
		}
	})
	return out, nil
}

// next returns the next rows that may go out; over says that all are settled.
func (f *fakeFeed) next() (batch []row, over bool) {
	f.source.mu.Lock()
	rows := f.source.rows
	f.source.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	over = !f.source.live
	first := -1
	for i, r := range rows {
		if f.acked[r.number] || f.dead[r.number] != nil {
			continue
		}
		over = false
		if f.since[r.line()] == 0 {
			f.ready(r.line())
		}
		if f.inFlight < f.maxInFlight && !f.busy[r.line()] && (first < 0 || f.since[r.line()] < f.since[rows[first].line()]) {
			first = i
		}
	}
	if first < 0 {
		return nil, over
	}
	line := rows[first].line()
	for _, r := range rows[first:] {
		if r.line() != line || f.acked[r.number] || f.dead[r.number] != nil {
			continue
		}
		if len(batch) == f.batch || len(batch) > 0 && f.attempts[r.number] > 0 {
			break
		}
		batch = append(batch, r)
	}
	f.busy[line] = true
	f.inFlight++
	f.mostAtOnce = max(f.mostAtOnce, f.inFlight)
	return batch, false
}

// ready puts a line behind those that are. Called with mu held.
func (f *fakeFeed) ready(line string) {
	delete(f.busy, line)
	f.turns++
	f.since[line] = f.turns
}

func (r row) line() string {
	if r.key == "" {
		return fmt.Sprint("#", r.number)
	}
	return r.topic + "/" + r.key
}

// await sees to what becomes of a batch.
func (f *fakeFeed) await(ctx context.Context, rows []row, batch []*message.Message, cancels []context.CancelCauseFunc) {
	blocked := false
	defer func() {
		for _, cancel := range cancels {
			cancel(context.Canceled)
		}
		f.mu.Lock()
		f.inFlight--
		if !blocked {
			f.ready(rows[0].line())
		}
		f.mu.Unlock()
		f.wake()
	}()
	// The grace begins once for all of them.
	var grace <-chan time.Time
	begin := func() {
		if grace == nil {
			ended := make(chan time.Time)
			time.AfterFunc(f.grace, func() { close(ended) })
			grace = ended
		}
	}
	wait := func(i int) (acked bool) {
		stop, lease := ctx.Done(), f.lease.Done()
		for {
			select {
			case <-batch[i].Acked():
				return f.lease.Err() == nil
			case <-batch[i].Nacked():
				return false
			case <-lease:
				cancels[i](context.Cause(f.lease))
				lease = nil
				begin()
			case <-stop:
				stop = nil
				begin()
			case <-grace:
				return false
			}
		}
	}
	for i, r := range rows {
		if wait(i) {
			cancels[i](context.Canceled)
			f.mu.Lock()
			f.acked[r.number] = true
			f.mu.Unlock()
			continue
		}
		counted := ctx.Err() == nil && f.lease.Err() == nil
		for j := i + 1; j < len(rows); j++ {
			cancels[j](errors.New("held up"))
			if wait(j) {
				f.mu.Lock()
				f.acked[rows[j].number] = true
				f.mu.Unlock()
			}
		}
		if !counted {
			return
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		err := f.failed(batch[i])
		var returned *delivery.ReturnedError
		if errors.As(err, &returned) {
			f.returned++
		} else {
			f.attempts[r.number]++
		}
		if outbox.IsPermanent(err) || f.maxAttempts > 0 && f.attempts[r.number] >= f.maxAttempts {
			f.dead[r.number] = err
			return
		}
		blocked = true
		time.AfterFunc(f.source.pause, func() {
			f.mu.Lock()
			f.ready(r.line())
			f.mu.Unlock()
			f.wake()
		})
		return
	}
}

func (f *fakeFeed) failed(msg *message.Message) error {
	err, _ := f.reasons.LoadAndDelete(msg)
	reason, ok := err.(error)
	if !ok {
		return errors.New("nobody said why")
	}
	return reason
}

func (f *fakeFeed) origin(msg *message.Message) origin {
	r, _ := msg.Context().Value(fakeRowKey{}).(row)
	f.mu.Lock()
	defer f.mu.Unlock()
	return origin{topic: r.topic, key: r.key, era: 7, number: r.number, attempt: f.attempts[r.number] + 1}
}

func (f *fakeFeed) fail(c *consumed, err error, permanent bool) bool {
	if permanent {
		err = outbox.Permanent(err)
	}
	f.reasons.Store(c.Message, err)
	c.Nack()
	return true
}

func (f *fakeFeed) again(c *consumed, err error) bool {
	f.reasons.Store(c.Message, &delivery.ReturnedError{Err: err})
	c.Nack()
	return true
}

func (f *fakeFeed) leave(c *consumed) { c.Nack() }

func (f *fakeFeed) close() error {
	f.mu.Lock()
	f.closed++
	f.mu.Unlock()
	f.running.Wait()
	return nil
}
