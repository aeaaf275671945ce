package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	// livePatience is how long a stream may take to open.
	livePatience = 30 * time.Second
	// liveLook is how often it is looked where a subscription reads.
	liveLook = 2 * time.Millisecond
)

// listener is a subscription to a topic whose handler acks at once.
type listener struct {
	consumer *outbox.Consumer
	done     chan struct{}
}

// listen subscribes a new group, from now on, and with ModeWAL waits until it is
// live. The handler is called in one goroutine.
func listen(ctx context.Context, config *pgxpool.Config, mode outbox.Mode, topic string, handle func(payload []byte)) (*listener, error) {
	consumer, err := outbox.NewConsumer(config, outbox.ConsumerConfig{Mode: mode}, nil)
	if err != nil {
		return nil, err
	}
	l := &listener{consumer: consumer, done: make(chan struct{})}
	if err := l.begin(ctx, mode, topic, handle); err != nil {
		return nil, errors.Join(err, consumer.Close())
	}
	return l, nil
}

func (l *listener) begin(ctx context.Context, mode outbox.Mode, topic string, handle func(payload []byte)) error {
	subscriber, err := outbox.NewSubscriber(l.consumer, outbox.SubscriberConfig{
		ConsumerGroup: newGroup(), StartFrom: outbox.StartLatest,
	}, nil)
	if err != nil {
		return err
	}
	messages, err := subscriber.Subscribe(ctx, topic)
	if err != nil {
		return err
	}
	go func() {
		defer close(l.done)
		for msg := range messages {
			handle(msg.Payload)
			msg.Ack()
		}
	}()
	if mode != outbox.ModeWAL {
		return nil
	}
	return awaitLive(ctx, l.consumer)
}

// status is that of the subscription.
func (l *listener) status() outbox.SubscriptionStatus { return l.consumer.Status().Subscriptions[0] }

func (l *listener) close() error {
	err := l.consumer.Close()
	<-l.done
	return err
}

// awaitLive returns when all subscriptions get their messages from the WAL.
func awaitLive(ctx context.Context, consumer *outbox.Consumer) error {
	ctx, cancel := context.WithTimeout(ctx, livePatience)
	defer cancel()
	for {
		err := notLive(consumer)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(liveLook):
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// notLive returns nil if all subscriptions get their messages from the WAL, and
// otherwise why one does not.
func notLive(consumer *outbox.Consumer) error {
	status := consumer.Status()
	for _, s := range status.Subscriptions {
		if s.Source != outbox.SourceWAL {
			return fmt.Errorf("topic %q is not read from the WAL: %s", s.Topic, cmp.Or(s.Reason, status.Reason, "it has not attached yet"))
		}
	}
	return nil
}

// lookout looks where a consumer's only subscription gets its messages.
type lookout struct {
	// live and all count the messages that came from the WAL, and at all.
	live, all int64
	// left is how often the subscription went back to the table, why is the
	// last reason.
	left int
	why  string

	stopping chan struct{}
	stopped  chan struct{}
}

// watch begins to look. The subscription is live.
func (l *listener) watch(m *meter) *lookout {
	w := &lookout{stopping: make(chan struct{}), stopped: make(chan struct{})}
	go func() {
		defer close(w.stopped)
		tick := time.NewTicker(liveLook)
		defer tick.Stop()
		before, received := l.status(), m.received()
		for ending := false; !ending; {
			select {
			case <-tick.C:
			case <-w.stopping:
				ending = true
			}
			now, all := l.status(), m.received()
			w.all += all - received
			switch {
			case now.Since.Equal(before.Since) && now.Source == outbox.SourceWAL:
				w.live += all - received
			case now.Since.Equal(before.Since):
			case before.Source == outbox.SourceWAL: // also if it is there again
				w.left++
				w.why = now.Reason
			}
			before, received = now, all
		}
	}()
	return w
}

// stop ends the looking; the fields may be read then.
func (w *lookout) stop() {
	close(w.stopping)
	<-w.stopped
}
