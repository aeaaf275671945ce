package outbox

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/lease"
	"github.com/millrace/watermill-outbox/internal/window"
)

var errNewLife = errors.New("the server began another life (a crash, a failover), positions are read again")

// maxQueryTimeout is how far the time limit of a page grows that ran into it.
const maxQueryTimeout = time.Hour

// subscription is one channel of a Subscriber: it takes the lease, delivers
// while it lasts, and takes it again.
type subscription struct {
	consumer *Consumer
	config   SubscriberConfig
	key      cursor.Key
	out      chan<- *message.Message
	base     context.Context //nolint:containedctx // handed on to messages
	logger   watermill.LoggerAdapter
}

// run returns when stop has ended and nothing is in flight any more.
func (s *subscription) run(stop context.Context) {
	for stop.Err() == nil {
		held, err := s.consumer.leases.Acquire(stop, s.key)
		if err != nil {
			return // stop has ended
		}
		s.logger.Debug("Topic taken", nil)
		s.deliver(stop, held)
		cause := context.Cause(held.Context())
		if errors.Is(cause, lease.ErrLost) {
			s.logger.Info("Topic lost: "+cause.Error(), nil)
		}
		ctx, cancel := context.WithTimeout(context.Background(), min(s.consumer.config.QueryTimeout, releaseTimeout))
		if err := held.Release(ctx); err != nil {
			s.logger.Error("Cannot store the last position; some messages may be delivered again", err, nil)
		}
		cancel()
		if errors.Is(cause, lease.ErrLost) {
			s.recreate(stop, held)
		}
	}
}

// recreate makes the cursor again if a life of the server ended that had it and
// the next one has not: its creation is among what was lost in a failover to a
// standby that lagged. In the same life it was removed by somebody, and stays
// so. A group that started at the latest begins at the earliest then: where it
// was is unknown, and to begin later could lose messages.
func (s *subscription) recreate(stop context.Context, held *lease.Lease) {
	ctx, cancel := context.WithTimeout(stop, s.consumer.config.QueryTimeout)
	defer cancel()
	now, err := s.consumer.queries.Now(ctx, s.consumer.pool)
	if err == nil && now.Life != held.Life {
		err = s.consumer.store.Ensure(ctx, s.consumer.pool, s.key, false)
	}
	if err != nil && stop.Err() == nil {
		s.logger.Error("Cannot see whether the cursor outlived the server", err, nil)
	}
}

// deliver reads and hands out until the lease or stop ends.
func (s *subscription) deliver(stop context.Context, held *lease.Lease) {
	tracker := delivery.NewTracker(held.Start)
	held.Report(tracker.State)

	reading, cancel := context.WithCancel(held.Context())
	defer cancel()
	unhook := context.AfterFunc(stop, cancel)
	defer unhook()
	pages := make(chan window.Page)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.read(reading, held, pages) })

	engine := delivery.Strict{
		Out: s.out, Base: s.base, Stop: stop,
		Grace: max(s.config.CloseTimeout, 0), Backoff: s.config.backoff(), MaxHoles: maxHoles,
		Wrap: func(ctx context.Context, row window.Row, attempt int) context.Context {
			return &deliveryContext{Context: ctx, row: &row, attempt: attempt, topic: s.key.Topic, group: s.key.Group}
		},
		Valid: held.Valid, Logger: s.logger,
	}
	engine.Run(held.Context(), tracker, pages)
}

// read sends one page after the other: first the holes, then windows, each one
// read while the page before is handed out. It tries for as long as it may.
func (s *subscription) read(ctx context.Context, held *lease.Lease, pages chan<- window.Page) {
	registration := s.consumer.watcher.Register(s.key.Topic)
	defer registration.Close()
	reader := window.Reader{
		Queries: s.consumer.queries, Topic: s.key.Topic, Group: s.key.Group,
		Limits: window.Limits{Rows: s.config.PageSize, Bytes: s.config.PageBytes},
	}
	retry := backoff.Policy{Min: 50 * time.Millisecond, Max: 5 * time.Second}
	failures, limit := 0, s.consumer.config.QueryTimeout
	pos, holes := held.Start.Position, held.Start.Holes
	seen := registration.Generation()
	for ctx.Err() == nil {
		if pos.Step == window.Idle {
			// The window that begins now has what is known by now. A wake that
			// comes later, while its pages are read, asks for another one.
			seen = registration.Generation()
		}
		var page window.Page
		var rest []window.Hole
		var err error
		query, cancel := context.WithTimeout(ctx, limit)
		if len(holes) > 0 {
			page, rest, err = reader.Holes(query, s.consumer.pool, holes)
		} else {
			page, err = reader.Next(query, s.consumer.pool, pos)
		}
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if errors.Is(err, window.ErrWentBack) {
				held.Lose(err)
				return
			}
			failures++
			if errors.Is(err, context.DeadlineExceeded) {
				limit = min(2*limit, maxQueryTimeout) // it may just take longer
			}
			pause := retry.Delay(failures)
			s.consumer.failed(err)
			s.logger.Error("Cannot read messages", explain(err, s.consumer.config.Schema), watermill.LogFields{"failures": failures, "retry_in": pause.String()})
			backoff.Wait(ctx, pause)
			continue
		case page.Life != held.Life:
			held.Lose(errNewLife)
			s.consumer.pool.Reset() // it may hold connections to either server
			return
		}
		failures, limit = 0, s.consumer.config.QueryTimeout
		select {
		case pages <- page:
		case <-ctx.Done():
			return
		}
		if page.Holes {
			holes = rest
			continue
		}
		pos = page.End
		if !page.More {
			registration.Wait(ctx, seen, lookInterval)
		}
	}
}
