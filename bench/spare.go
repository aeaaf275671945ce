package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	spareRows = 1_000_000
	// spareWriters publish one message in a transaction, one after the other, with
	// pauses of sparePause.
	spareWriters = 4
	sparePause   = 5 * time.Millisecond
	// sparePatience is how long the recovery may take.
	sparePatience = 15 * time.Minute
	spareTopic    = "orders"
)

// spareScenario: nobody has looked after the outbox for so long that a million rows
// are in the DEFAULT partition, and more come, when upkeep starts. It must make
// partitions, have everything delivered, and clear the DEFAULT partition, and nobody
// who publishes may wait for it. It is one run, whatever -rounds says.
func spareScenario(ctx context.Context, b *bench) error {
	d, upkeep, err := b.soakDatabase(ctx)
	if err != nil {
		return err
	}
	s := &spare{bench: b, database: d, rows: b.count(spareRows), upkeep: upkeep, emptied: make(chan struct{})}
	if err := s.neglect(ctx); err != nil {
		return err
	}
	waits, err := watchLockWaits(ctx, d)
	if err != nil {
		return err
	}
	_, err = b.turn(ctx, b.scenario, contender{run: func(ctx context.Context) (float64, error) { return 0, s.run(ctx) }})
	long, known, logErr := waits.end(ctx, soakWriterName)
	if err := errors.Join(err, logErr); err != nil {
		return err
	}
	s.report()
	if known {
		b.addLockWaits(long)
	}
	return nil
}

// spare is one run.
type spare struct {
	*bench

	database *database
	upkeep   outbox.MaintenanceConfig
	rows     int
	watch    *soakWatch

	published, received atomic.Int64
	// slowest is the longest that a writer has waited for its commit.
	slowest atomic.Int64
	// room is when there were partitions again, delivered when the group had as many
	// as there were at first, and emptied, which is closed then, when the DEFAULT
	// partition was empty. All are since the upkeep began.
	room, delivered, cleared time.Duration
	emptied                  chan struct{}
}

// neglect leaves the outbox as it is when the last partition made ahead is over, and
// the rows of the last hour are in the DEFAULT one.
func (s *spare) neglect(ctx context.Context) error {
	rows, err := s.database.pool.Query(ctx, "SELECT name FROM outbox.partitions WHERE upper IS NOT NULL")
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, err := s.database.pool.Exec(ctx, "DROP TABLE "+pgx.Identifier{schema.DefaultName, name}.Sanitize()); err != nil {
			return err
		}
	}
	if _, err := s.database.pool.Exec(ctx, "DELETE FROM outbox.partitions WHERE upper IS NOT NULL"); err != nil {
		return err
	}
	_, err = s.database.pool.Exec(ctx, `INSERT INTO outbox.messages (topic, uuid, metadata, payload, created_at)
		SELECT $1::text, gen_random_uuid()::text, $2::text::json, `+payload200+`, clock_timestamp() - interval '1 hour' * (1 - i / $3::float8)
		FROM generate_series(1, $3::integer) AS i`, spareTopic, metadata, s.rows)
	if err == nil {
		_, err = s.database.pool.Exec(ctx, "VACUUM ANALYZE outbox.messages")
	}
	return err
}

func (s *spare) run(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, sparePatience)
	defer cancel()
	config, err := s.database.config()
	if err != nil {
		return err
	}
	config.MaxConns = spareWriters
	config.ConnConfig.RuntimeParams["application_name"] = soakWriterName
	writing, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer writing.Close()
	publisher, err := outbox.NewPublisher(writing, outbox.PublisherConfig{}, nil)
	if err != nil {
		return err
	}

	s.watch = &soakWatch{database: s.database, every: max(s.duration(soakSizeLook), 2*soakLockLook), each: s.look}
	group, working := errgroup.WithContext(ctx)
	watching, stop := context.WithCancel(working)
	defer stop()
	writingUntil, quiet := context.WithCancel(working)
	defer quiet()
	var writers errgroup.Group
	for range spareWriters {
		writers.Go(func() error { return s.write(working, writingUntil, publisher) })
	}
	group.Go(func() error { return s.watch.run(working, watching) })
	group.Go(func() error { return s.consume(working, watching) })
	group.Go(func() error {
		defer stop()
		select {
		case <-s.emptied:
		case <-working.Done():
		}
		quiet()
		if err := writers.Wait(); err != nil {
			return err
		}
		for since := time.Now(); s.lost() > 0 && time.Since(since) < soakPatience; {
			wait(working, 50*time.Millisecond)
		}
		return context.Cause(working)
	})
	return group.Wait()
}

// look notes how far the recovery is.
func (s *spare) look(sample soakSample) {
	reach := func(at *time.Duration, reached bool) bool {
		if *at != 0 || !reached {
			return false
		}
		*at = sample.at
		return true
	}
	if reach(&s.room, sample.partitions > 0) {
		s.logf("%s: there are partitions", sample.at.Round(time.Second))
	}
	if reach(&s.delivered, s.received.Load() >= int64(s.rows)) {
		s.logf("%s: the group has what there was", sample.at.Round(time.Second))
	}
	if s.room != 0 && reach(&s.cleared, sample.spare == 0) {
		s.logf("%s: the DEFAULT partition is empty", sample.at.Round(time.Second))
		close(s.emptied)
	}
}

// lost is how many messages have not come. Nobody publishes.
func (s *spare) lost() int64 { return int64(s.rows) + s.published.Load() - s.received.Load() }

// write publishes until ending ends.
func (s *spare) write(ctx, ending context.Context, publisher *outbox.Publisher) error {
	for ending.Err() == nil {
		began := time.Now()
		if err := publisher.Publish(spareTopic, message.NewMessage(watermill.NewUUID(), newPayload(payloadBytes))); err != nil {
			return err
		}
		s.published.Add(1)
		raise(&s.slowest, int64(time.Since(began)))
		wait(ending, sparePause)
	}
	return ctx.Err()
}

// consume is the process with the upkeep, until stop ends.
func (s *spare) consume(ctx, stop context.Context) (err error) {
	config, err := s.database.config()
	if err != nil {
		return err
	}
	config.ConnConfig.RuntimeParams["application_name"] = soakConsumerName
	consumer, err := outbox.NewConsumer(config, outbox.ConsumerConfig{Mode: outbox.ModePoll, Maintenance: s.upkeep}, &soakLogger{b: s.bench})
	if err != nil {
		return err
	}
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	if err != nil {
		return errors.Join(err, consumer.Close())
	}
	batches, err := subscriber.SubscribeBatches(stop, outbox.ListTopics(spareTopic), soakBatch)
	if err != nil {
		return errors.Join(err, consumer.Close())
	}
	seen := map[string]struct{}{}
	for batch := range batches {
		for _, msg := range batch {
			seen[msg.UUID] = struct{}{}
			msg.Ack()
		}
		s.received.Store(int64(len(seen)))
	}
	return errors.Join(consumer.Close(), ctx.Err())
}

// report adds the figures.
func (s *spare) report() {
	add := func(metric, unit string, value float64, required *requirement) {
		s.add(newFigure(s.scenario, metric, unit, series{value}, nil, required))
	}
	add(fmt.Sprintf("of %d in the DEFAULT partition and %d more: lost", s.rows, s.published.Load()), "messages", float64(s.lost()), maxValue(0))
	add("until there were partitions", "s", s.room.Seconds(), nil)
	add("until the group had what there was", "s", s.delivered.Seconds(), nil)
	add("until the DEFAULT partition was empty", "s", s.cleared.Seconds(), nil)
	add("longest wait of a writer for a lock because of upkeep", "ms", s.watch.byUpkeep, maxValue(soakMaxWait))
	if s.watch.culprit != "" {
		s.logf("the longest wait because of upkeep was for: %s", s.watch.culprit)
	}
	add("longest wait of a writer for any lock", "ms", s.watch.byAll, nil)
	add("longest time between two looks at the locks", "ms", s.watch.gap, nil)
	add("longest transaction of a writer", "ms", float64(s.slowest.Load())/float64(time.Millisecond), nil)
}
