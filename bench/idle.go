package main

import (
	"context"
	"errors"
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

// idleScenario: a process whose topics are quiet, polling and with the WAL, against
// one that asks for each topic by itself, as often as the outbox polls. Statements
// are those of the ordinary connections; the stream's own has none.
func idleScenario(ctx context.Context, b *bench) error {
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	for _, topics := range []int{1, 50} {
		var statements, cpu [3]series // of bare, of polling, of ModeAuto
		watch := func(i int, name string, mode outbox.Mode) func(context.Context) (float64, error) {
			return func(ctx context.Context) (float64, error) {
				m, err := inChild(ctx, task{
					Name: name, URL: d.url(), Mode: mode, N: topics,
					Settle: b.duration(idleSettle).Seconds(), Seconds: b.duration(idleTurn).Seconds(),
				})
				statements[i], cpu[i] = append(statements[i], m["statements"]), append(cpu[i], m["cpu"])
				return m["cpu"], err
			}
		}
		metric := fmt.Sprintf("with %d topics", topics)
		_, err := b.rounds(ctx, "CPU "+metric,
			contender{"bare", watch(0, "idle bare", "")},
			contender{"polling", watch(1, "idle outbox", outbox.ModePoll)},
			contender{"ModeAuto", watch(2, "idle outbox", outbox.ModeAuto)})
		if err != nil {
			return err
		}
		for i, mode := range []string{"polling", "ModeAuto"} {
			b.add(newFigure(b.scenario, "statements "+metric+", "+mode, "statements/s", statements[i+1], statements[0], maxValue(idleMaxStatements)))
			b.add(newFigure(b.scenario, "CPU "+metric+", "+mode, "% of a core", cpu[i+1], cpu[0], maxValue(idleMaxCPU)))
		}
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
	consumer, err := outbox.NewConsumer(config, outbox.ConsumerConfig{Mode: t.Mode}, nil)
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
	if t.Mode != outbox.ModePoll {
		if err := awaitLive(ctx, consumer); err != nil {
			return nil, err
		}
	}
	measured, err := watchIdle(counted, t)
	if err == nil && t.Mode != outbox.ModePoll {
		err = notLive(consumer)
	}
	return measured, errors.Join(err, consumer.Close())
}

// watchIdle measures the process itself for a while.
func watchIdle(counted *counter, t task) (map[string]float64, error) {
	t.settle()
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
