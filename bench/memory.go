package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	memorySmall = 1_000_000
	memoryLarge = 300
	memoryMax   = 100 // MB
	// memorySettle lets the process come to rest.
	memorySettle = time.Second

	memorySmallLive = 100_000
	memoryLargeLive = 30
	// storedLarge is the payload of a large message that is there already.
	storedLarge = `(SELECT payload FROM outbox.messages WHERE topic = 'large' LIMIT 1)`
)

// memoryScenario: the resident memory that draining adds to an idle process, as
// the kernel saw it at its highest (VmHWM, so nothing falls between samples),
// with Go's default settings of the garbage collector. Bare pgx reads pages of
// about the same size. The last figures are of messages that come from the WAL,
// as fast as they are written.
func memoryScenario(ctx context.Context, b *bench) error {
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	small, large := b.count(memorySmall), b.count(memoryLarge)
	if err := errors.Join(d.load(ctx, "small", small, payload200), d.load(ctx, "large", large, payload5MB), d.settle(ctx)); err != nil {
		return err
	}
	for _, c := range []struct {
		name, topic string
		n, page     int
		live        int
		payload     string
	}{
		{"200 B", "small", small, barePage, b.count(memorySmallLive), payload200},
		{"5 MB", "large", large, 2, b.count(memoryLargeLive), storedLarge},
	} {
		added := func(t task) func(context.Context) (float64, error) {
			t.URL, t.Topic, t.Page, t.Settle = d.url(), c.topic, c.page, b.duration(memorySettle).Seconds()
			return func(ctx context.Context) (float64, error) {
				m, err := inChild(ctx, t)
				return m["peak"] - m["idle"], err
			}
		}
		metric := fmt.Sprintf("%d of %s", c.n, c.name)
		results, err := b.rounds(ctx, metric,
			contender{"bare", added(task{Name: "memory of bare", N: c.n})},
			contender{"polling", added(task{Name: "memory of outbox", Mode: outbox.ModePoll, N: c.n})},
			contender{"ModeAuto", added(task{Name: "memory of outbox", Mode: outbox.ModeAuto, N: c.n})},
			contender{"live", added(task{Name: "memory of live", N: c.live, Payload: c.payload})})
		if err != nil {
			return err
		}
		b.add(newFigure(b.scenario, metric+", polling", "MB above idle", results[1], results[0], maxValue(memoryMax)))
		b.add(newFigure(b.scenario, metric+", ModeAuto", "MB above idle", results[2], results[0], maxValue(memoryMax)))
		b.add(newFigure(b.scenario, fmt.Sprintf("%d of %s, live", c.live, c.name), "MB above idle", results[3], nil, maxValue(memoryMax)))
	}
	return nil
}

func memoryOfBare(ctx context.Context, t task) (map[string]float64, error) {
	pool, err := pgxpool.New(ctx, t.URL)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	if _, err := barePageAfter(ctx, pool, "nothing", 0, t.Page); err != nil {
		return nil, err
	}
	return memoryOf(func() error { return readBare(ctx, pool, t.Topic, t.N, t.Page) })
}

func memoryOfOutbox(ctx context.Context, t task) (map[string]float64, error) {
	config, err := pgxpool.ParseConfig(t.URL)
	if err != nil {
		return nil, err
	}
	consumer, err := outbox.NewConsumer(config, outbox.ConsumerConfig{Mode: t.Mode}, nil)
	if err != nil {
		return nil, err
	}
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "idle"}, nil)
	if err != nil {
		return nil, err
	}
	if _, err := subscriber.Subscribe(ctx, "nothing"); err != nil {
		return nil, err
	}
	t.settle()
	m, err := memoryOf(func() error { return drain(ctx, consumer, newGroup(), t.Topic, t.N) })
	return m, errors.Join(err, consumer.Close())
}

// memoryOfLive has the messages written while it is subscribed.
func memoryOfLive(ctx context.Context, t task) (map[string]float64, error) {
	pool, err := pgxpool.New(ctx, t.URL)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	m := newMeter()
	l, err := listen(ctx, pool.Config(), outbox.ModeWAL, t.Topic, func([]byte) { m.row() })
	if err != nil {
		return nil, err
	}
	t.settle()
	w := writers{
		pool: pool, topic: t.Topic, payload: t.Payload, conns: 1, rows: t.N, chunk: min(t.N, liveChunk),
		wait: func(written int) bool { return int64(written)-m.received() > liveWindow },
	}
	m.time(1, int64(w.rows))
	measured, err := memoryOf(func() error {
		if _, err := w.run(ctx); err != nil {
			return err
		}
		_, err := m.await(ctx)
		return err
	})
	return measured, errors.Join(err, notLive(l.consumer), l.close())
}

// memoryOf measures the memory before and at its highest, in MB.
func memoryOf(work func() error) (map[string]float64, error) {
	idle, err := residentMB("VmRSS")
	if err != nil {
		return nil, err
	}
	if err := work(); err != nil {
		return nil, err
	}
	peak, err := residentMB("VmHWM")
	return map[string]float64{"idle": idle, "peak": peak}, err
}

// residentMB returns a line of the kernel's status of this process.
func residentMB(name string) (float64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, fmt.Errorf("memory is measured on Linux only: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
			return kib * 1024 / 1e6, err
		}
	}
	return 0, fmt.Errorf("the kernel's status has no %s", name)
}
