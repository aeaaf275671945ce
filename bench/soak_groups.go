package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	soakConsumerName = "outbox-bench soak consumer"
	soakBatch        = 100
	// soakNapEvery is how often the slow group stops, and soakNap for how long. It
	// is as fast as the others in between.
	soakNapEvery = 5 * time.Minute
	soakNap      = 2 * time.Minute
	// soakPatience is how long nothing may come of what is still to come.
	soakPatience = time.Minute
)

// soakGroup is a consumer group that keeps a tally.
type soakGroup struct {
	name string
	*tally

	running sync.WaitGroup
	// behind is the most messages that it had still to get.
	behind int64
}

// soakGroups are all groups, over three Consumers, as in three processes. Each takes
// part in the upkeep.
type soakGroups struct {
	list      []*soakGroup
	consumers []*outbox.Consumer
	live      *outbox.Consumer
	// awake is closed when the slow group naps no more.
	awake chan struct{}
}

// newSoakGroups subscribes: one group that polls, one that has its messages from the
// WAL if possible, one that reads all topics together, beside the latter, and a slow
// one.
func newSoakGroups(ctx context.Context, b *bench, d *database, upkeep outbox.MaintenanceConfig, keys int) (g *soakGroups, err error) {
	g = &soakGroups{awake: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
		}
	}()
	consumer := func(mode outbox.Mode) (*outbox.Consumer, error) {
		config, err := d.config()
		if err != nil {
			return nil, err
		}
		config.ConnConfig.RuntimeParams["application_name"] = soakConsumerName
		c, err := outbox.NewConsumer(config, outbox.ConsumerConfig{Mode: mode, Maintenance: upkeep}, &soakLogger{b: b})
		if err == nil {
			g.consumers = append(g.consumers, c)
		}
		return c, err
	}
	subscriber := func(c *outbox.Consumer, config outbox.SubscriberConfig) (*soakGroup, *outbox.Subscriber, error) {
		s, err := outbox.NewSubscriber(c, config, nil)
		group := &soakGroup{name: config.ConsumerGroup, tally: newTally(keys)}
		g.list = append(g.list, group)
		return group, s, err
	}
	each := func(c *outbox.Consumer, config outbox.SubscriberConfig, pause func()) error {
		group, s, err := subscriber(c, config)
		if err != nil {
			return err
		}
		for i := range soakTopics {
			messages, err := s.Subscribe(ctx, soakTopic(i))
			if err != nil {
				return err
			}
			group.running.Go(func() {
				for msg := range messages {
					pause()
					group.take(msg.Payload)
					msg.Ack()
				}
			})
		}
		return nil
	}
	atOnce := func() {}

	polling, err := consumer(outbox.ModePoll)
	if err != nil {
		return nil, err
	}
	if err := each(polling, outbox.SubscriberConfig{ConsumerGroup: "polling"}, atOnce); err != nil {
		return nil, err
	}
	if g.live, err = consumer(outbox.ModeAuto); err != nil {
		return nil, err
	}
	if err := each(g.live, outbox.SubscriberConfig{ConsumerGroup: "live", Ordering: outbox.OrderingByKey}, atOnce); err != nil {
		return nil, err
	}
	many, s, err := subscriber(g.live, outbox.SubscriberConfig{ConsumerGroup: "all topics", Ordering: outbox.OrderingByKey})
	if err != nil {
		return nil, err
	}
	batches, err := s.SubscribeBatches(ctx, outbox.AllTopics(), soakBatch)
	if err != nil {
		return nil, err
	}
	many.running.Go(func() {
		for batch := range batches {
			many.handle(batch)
		}
	})
	slow, err := consumer(outbox.ModePoll)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	return g, each(slow, outbox.SubscriberConfig{ConsumerGroup: "slow", Ordering: outbox.OrderingByKey}, func() {
		every, nap := b.duration(soakNapEvery), b.duration(soakNap)
		if left := every - time.Since(start)%every; left < nap {
			select {
			case <-time.After(left):
			case <-g.awake:
			}
		}
	})
}

// handle takes the messages of a batch.
func (g *soakGroup) handle(batch []*message.Message) {
	for _, msg := range batch {
		g.take(msg.Payload)
		msg.Ack()
	}
}

// await returns when all groups have all that was committed, or nothing comes any
// more. All transactions have ended.
func (g *soakGroups) await(ctx context.Context, keys []*soakKey) error {
	close(g.awake)
	before, since := int64(-1), time.Now()
	for {
		var lost, received int64
		for _, group := range g.list {
			lost += group.lost(keys)
			received += group.received()
		}
		switch {
		case lost == 0:
			return nil
		case received != before:
			before, since = received, time.Now()
		case time.Since(since) > soakPatience:
			return nil // the figures say so
		}
		wait(ctx, 50*time.Millisecond)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// look notes how far the groups are behind, and says it.
func (g *soakGroups) look(committed int64) (text string) {
	for _, group := range g.list {
		behind := max(committed-group.received(), 0)
		group.behind = max(group.behind, behind)
		text += fmt.Sprintf(", %s is %d behind", group.name, behind)
	}
	return text
}

// close ends the subscriptions. Nothing is added to a tally afterwards.
func (g *soakGroups) close() error {
	var err error
	for _, c := range g.consumers {
		err = errors.Join(err, c.Close())
	}
	for _, group := range g.list {
		group.running.Wait()
	}
	return err
}

// soakLogger prints what goes wrong.
type soakLogger struct {
	b      *bench
	fields watermill.LogFields
}

// Error implements watermill.LoggerAdapter.
func (l *soakLogger) Error(text string, err error, fields watermill.LogFields) {
	l.b.logf("%s: %v %v", text, err, l.fields.Add(fields))
}

// Info implements watermill.LoggerAdapter.
func (l *soakLogger) Info(string, watermill.LogFields) {}

// Debug implements watermill.LoggerAdapter.
func (l *soakLogger) Debug(string, watermill.LogFields) {}

// Trace implements watermill.LoggerAdapter.
func (l *soakLogger) Trace(string, watermill.LogFields) {}

// With implements watermill.LoggerAdapter.
func (l *soakLogger) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return &soakLogger{b: l.b, fields: l.fields.Add(fields)}
}
