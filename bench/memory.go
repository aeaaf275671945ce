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
)

// memoryScenario: the resident memory that draining adds to an idle process, as
// the kernel saw it at its highest (VmHWM, so nothing falls between samples),
// with Go's default settings of the garbage collector. Bare pgx reads pages of
// about the same size.
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
		metric, topic string
		n, page       int
	}{
		{fmt.Sprintf("%d of 200 B", small), "small", small, barePage},
		{fmt.Sprintf("%d of 5 MB", large), "large", large, 2},
	} {
		added := func(name string) func(context.Context) (float64, error) {
			return func(ctx context.Context) (float64, error) {
				m, err := inChild(ctx, task{Name: name, URL: d.url(), Topic: c.topic, N: c.n, Page: c.page})
				return m["peak"] - m["idle"], err
			}
		}
		if err := b.compare(ctx, c.metric, "MB above idle", maxValue(memoryMax), added("memory of bare"), added("memory of outbox")); err != nil {
			return err
		}
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
	consumer, err := outbox.NewConsumer(config, outbox.ConsumerConfig{}, nil)
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
	time.Sleep(time.Second)
	group := strconv.FormatInt(time.Now().UnixNano(), 36)
	m, err := memoryOf(func() error { return drain(ctx, consumer, group, t.Topic, t.N) })
	return m, errors.Join(err, consumer.Close())
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
