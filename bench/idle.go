package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	idleTurn          = 20 * time.Second
	idleSettle        = 2 * time.Second
	idleMaxStatements = 15
	idleMaxCPU        = 2 // percent of one core
)

// idleScenario: a process whose topics are quiet, against one that asks for each
// topic by itself, as often.
func idleScenario(ctx context.Context, b *bench) error {
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	for _, topics := range []int{1, 50} {
		var statements, cpu [2]series // of bare, of outbox
		watch := func(i int, name string) func(context.Context) (float64, error) {
			return func(ctx context.Context) (float64, error) {
				m, err := inChild(ctx, task{Name: name, URL: d.url(), N: topics, Seconds: b.duration(idleTurn).Seconds()})
				statements[i], cpu[i] = append(statements[i], m["statements"]), append(cpu[i], m["cpu"])
				return m["cpu"], err
			}
		}
		metric := fmt.Sprintf("with %d topics", topics)
		if _, err := b.rounds(ctx, "CPU "+metric, contender{"bare", watch(0, "idle bare")}, contender{"outbox", watch(1, "idle outbox")}); err != nil {
			return err
		}
		b.add(newFigure(b.scenario, "statements "+metric, "statements/s", statements[1], statements[0], maxValue(idleMaxStatements)))
		b.add(newFigure(b.scenario, "CPU "+metric, "% of a core", cpu[1], cpu[0], maxValue(idleMaxCPU)))
	}
	return nil
}

func idleBare(ctx context.Context, t task) (map[string]float64, error) {
	config, counted, err := countingConfig(t.URL)
	if err != nil {
		return nil, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	polling, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, t.N)
	for i := range t.N {
		go func() {
			for polling.Err() == nil {
				if _, err := barePageAfter(polling, pool, fmt.Sprint("topic ", i), 0, barePage); err != nil {
					failed <- err
					return
				}
				time.Sleep(outbox.DefaultPollInterval)
			}
		}()
	}
	measured, err := watchIdle(counted, t)
	if err != nil {
		return nil, err
	}
	select {
	case err := <-failed:
		return nil, err
	default:
		return measured, nil
	}
}

func idleOutbox(ctx context.Context, t task) (map[string]float64, error) {
	config, counted, err := countingConfig(t.URL)
	if err != nil {
		return nil, err
	}
	consumer, err := outbox.NewConsumer(config, outbox.ConsumerConfig{}, nil)
	if err != nil {
		return nil, err
	}
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	if err != nil {
		return nil, err
	}
	for i := range t.N {
		if _, err := subscriber.Subscribe(ctx, fmt.Sprint("topic ", i)); err != nil {
			return nil, err
		}
	}
	measured, err := watchIdle(counted, t)
	if err != nil {
		return nil, err
	}
	return measured, consumer.Close()
}

// watchIdle measures the process itself for a while.
func watchIdle(counted *counter, t task) (map[string]float64, error) {
	time.Sleep(idleSettle)
	statements := counted.n.Load()
	cpu, err := cpuTime()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	time.Sleep(time.Duration(t.Seconds * float64(time.Second)))
	elapsed := time.Since(start).Seconds()
	later, err := cpuTime()
	return map[string]float64{
		"statements": float64(counted.n.Load()-statements) / elapsed,
		"cpu":        100 * (later - cpu).Seconds() / elapsed,
	}, err
}

// cpuTime is what this process has used, in user and in system mode.
func cpuTime() (time.Duration, error) {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0, err
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), nil
}

// countingConfig is a pool's configuration whose connections count statements.
func countingConfig(url string) (*pgxpool.Config, *counter, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, nil, err
	}
	c := &counter{}
	config.ConnConfig.Tracer = c
	return config, c, nil
}

// counter counts statements, on any number of connections.
type counter struct{ n atomic.Int64 }

var _ pgx.QueryTracer = (*counter)(nil)

// TraceQueryStart implements pgx.QueryTracer.
func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
