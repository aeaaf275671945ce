package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	growthSmall = 100_000
	growthLarge = 5_000_000
	growthMax   = 1.3
	// growthPages is how many pages a turn reads, each of growthNews messages.
	growthPages = 10
	growthNews  = 1000
)

// growthScenario: the page that holds the 1000 messages which came since the
// last one, read with the engine's own statement, while more and more rows of
// the past are stored.
func growthScenario(ctx context.Context, b *bench) error {
	var contenders []contender
	var sizes []int
	for _, rows := range []int{growthSmall, growthLarge} {
		size := b.count(rows)
		s, err := newSteadyState(ctx, b, size)
		if err != nil {
			return err
		}
		defer s.close()
		sizes = append(sizes, size)
		contenders = append(contenders,
			contender{fmt.Sprintf("bare at %d", size), s.bare},
			contender{fmt.Sprintf("outbox at %d", size), s.outbox})
	}
	results, err := b.rounds(ctx, "page", contenders...)
	if err != nil {
		return err
	}
	bare, ours := []series{results[0], results[2]}, []series{results[1], results[3]}
	for i, size := range sizes {
		b.add(newFigure(b.scenario, fmt.Sprintf("page with %d rows stored, against bare", size), "ms", ours[i], bare[i], nil))
	}
	change := fmt.Sprintf("page with %d rows stored, against %d", sizes[1], sizes[0])
	b.add(newFigure(b.scenario, change, "ms", ours[1], ours[0], maxRatio(growthMax)))
	b.add(newFigure(b.scenario, "the same for the bare page", "ms", bare[1], bare[0], nil))
	return nil
}

// steadyState is a topic of which everything has been delivered.
type steadyState struct {
	database *database
	reading  *pgxpool.Pool
	reader   window.Reader
	position window.Position
}

func newSteadyState(ctx context.Context, b *bench, rows int) (*steadyState, error) {
	d, err := b.database(ctx)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(d.load(ctx, "orders", rows, payload200), d.settle(ctx)); err != nil {
		return nil, err
	}
	return d.steadyState(ctx)
}

// steadyState takes what is there for delivered.
func (d *database) steadyState(ctx context.Context) (*steadyState, error) {
	s := &steadyState{database: d}
	var err error
	if s.reading, err = d.consumerPool(ctx); err != nil {
		return nil, err
	}
	queries := window.NewQueries(schema.DefaultName)
	now, err := queries.Now(ctx, s.reading)
	if err != nil {
		s.close()
		return nil, err
	}
	s.position = window.Latest(now.Life.Era, now.Snapshot, now.Top)
	s.reader = window.Reader{
		Queries: queries, Topics: window.One("orders"), Group: outbox.DefaultConsumerGroup,
		Limits: window.Limits{Rows: growthNews, Bytes: outbox.DefaultPageBytes},
	}
	return s, nil
}

func (s *steadyState) close() { s.reading.Close() }

// bare is the median time of a bare page with the news, in ms.
func (s *steadyState) bare(ctx context.Context) (float64, error) {
	return s.pages(ctx, func(last int64) (int, error) {
		rows, err := barePageAfter(ctx, s.database.pool, "orders", last, growthNews)
		return len(rows), err
	})
}

// outbox is the same of the engine's page, which opens a window.
func (s *steadyState) outbox(ctx context.Context) (float64, error) {
	return s.pages(ctx, func(int64) (int, error) {
		page, err := s.reader.Next(ctx, s.reading, s.position)
		s.position = page.End
		return len(page.Rows), err
	})
}

// pages publishes and reads growthPages times, and returns the median time of a
// read. The first read, which is not counted, prepares the statement.
func (s *steadyState) pages(ctx context.Context, read func(last int64) (int, error)) (float64, error) {
	var times series
	for i := range growthPages + 1 {
		if err := s.catchUp(ctx); err != nil {
			return 0, err
		}
		var last int64
		if err := s.database.pool.QueryRow(ctx, "SELECT last_value FROM outbox.messages_id_seq").Scan(&last); err != nil {
			return 0, err
		}
		if err := s.database.load(ctx, "orders", growthNews, payload200); err != nil {
			return 0, err
		}
		start := time.Now()
		n, err := read(last)
		took := time.Since(start)
		if err != nil {
			return 0, err
		}
		if n != growthNews {
			return 0, fmt.Errorf("a page has %d of %d rows", n, growthNews)
		}
		if i > 0 {
			times = append(times, took.Seconds()*1000)
		}
	}
	return times.median(), nil
}

// catchUp reads until nothing is left and the window is closed.
func (s *steadyState) catchUp(ctx context.Context) error {
	for {
		page, err := s.reader.Next(ctx, s.reading, s.position)
		if err != nil {
			return err
		}
		s.position = page.End
		if !page.More && len(page.Rows) == 0 {
			return nil
		}
	}
}

// consumerPool returns a pool with the session settings of a Consumer's, taken
// from one as it connects.
func (d *database) consumerPool(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := d.config()
	if err != nil {
		return nil, err
	}
	settings := map[string]string{}
	spied := config.Copy()
	spied.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
		settings = conn.RuntimeParams
		return nil
	}
	consumer, err := outbox.NewConsumer(spied, outbox.ConsumerConfig{Mode: outbox.ModePoll}, nil)
	if err != nil {
		return nil, err
	}
	if err := consumer.Close(); err != nil {
		return nil, err
	}
	config.ConnConfig.RuntimeParams = settings
	return pgxpool.NewWithConfig(ctx, config)
}
