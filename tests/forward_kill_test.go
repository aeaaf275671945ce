package tests

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/internal/backoff"
)

// forwardURL is the database of a process that forwards, forwardBrokers the addresses of
// the brokers that it forwards to, as JSON, by the name of the kind.
const (
	forwardURL     = "OUTBOX_TEST_FORWARD_URL"
	forwardBrokers = "OUTBOX_TEST_FORWARD_BROKERS"
)

// forwardAsChild forwards until it is killed or its standard input ends.
func forwardAsChild() error {
	db, err := pgxpool.ParseConfig(os.Getenv(forwardURL))
	if err != nil {
		return err
	}
	var addresses map[string]string
	if err := json.Unmarshal([]byte(os.Getenv(forwardBrokers)), &addresses); err != nil {
		return err
	}
	var destinations []forwarder.Destination
	for _, kind := range forwardKinds() {
		address, ok := addresses[kind.name]
		if !ok {
			continue
		}
		publisher, err := kind.connect(address, testLogger(nil))
		if err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
		destinations = append(destinations, forwarder.Destination{
			Name: kind.name, Publisher: publisher, DeduplicationKey: kind.deduplication, MaxInFlight: 16, Classify: faulty,
		})
	}
	if len(destinations) != len(addresses) {
		return fmt.Errorf("%d destinations for %v", len(destinations), addresses)
	}
	consumer, err := outbox.NewConsumer(db, outbox.ConsumerConfig{
		Schema: oddSchema, PollInterval: 10 * time.Millisecond, CheckpointInterval: childCheckpoint, Lease: outbox.MinLease, Mode: testMode,
	}, testLogger(nil))
	if err != nil {
		return err
	}
	f, err := forwarder.New(forwarder.Config{
		Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.AllTopics()), Destinations: destinations,
	}, testLogger(nil))
	if err != nil {
		return err
	}
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadByte()
		_ = f.Close()
	}()
	if err := f.Run(context.Background()); err != nil {
		return err
	}
	for _, d := range destinations {
		if err := d.Publisher.Close(); err != nil {
			return err
		}
	}
	return consumer.Close()
}

// arrived returns how many messages are in a broker.
func (f *forwardTest) arrived(t *testing.T, name string) int {
	t.Helper()
	received, err := f.brokers[name].Received(t.Context(), forwardTopic)
	assert.NoError(t, err)
	return len(received)
}

// Processes that forward to all brokers are killed with kill -9, one after the other,
// while a workload goes on. Each broker has everything in the end, and in order: what was
// in flight comes again, beside nothing that is behind it. What has de-duplication has
// nothing twice.
func TestForwardKill(t *testing.T) {
	t.Parallel()

	f := newForwardTest(t, newFixture(t))
	addresses := map[string]string{}
	once := map[string]bool{}
	for _, kind := range forwardKinds() {
		b := newBroker(t, kind.open)
		f.destination(t, kind.name, b, nil)
		addresses[kind.name] = b.Address()
		once[kind.name] = kind.deduplication != ""
	}
	list, err := json.Marshal(addresses)
	require.NoError(t, err)
	start := func() *child {
		return f.startChild(t, "", outbox.MinLease, forwardURL+"="+f.url, forwardBrokers+"="+string(list), childURL+"=")
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var writing sync.WaitGroup
	writing.Go(func() {
		random := rand.New(rand.NewPCG(3, 3))
		for ctx.Err() == nil {
			assert.NoError(t, f.work.transaction(context.WithoutCancel(ctx), random, false))
			backoff.Wait(ctx, 5*time.Millisecond) // what is there is read again and again below
		}
	})
	for range number("OUTBOX_TEST_KILLS", 8) / 4 {
		before := map[string]int{}
		for name := range addresses {
			before[name] = f.arrived(t, name)
		}
		c := start()
		for name := range addresses {
			require.Eventually(t, func() bool { return f.arrived(t, name) > before[name]+20 }, 2*waitFor, 50*time.Millisecond, "%s: it forwards nothing", name)
		}
		c.kill()
		require.Error(t, c.wait())
	}
	last := start()
	cancel()
	writing.Wait()
	verdicts := f.requireForwarded(t)
	require.NoError(t, last.stdin.Close())
	require.NoError(t, last.command.Wait())
	for name := range addresses {
		if once[name] {
			require.Zero(t, verdicts[name].Duplicated, "%s: %s", name, verdicts[name])
		}
	}
}
