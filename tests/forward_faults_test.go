package tests

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/forwarder/jetstream"
	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/brokertest"
	broker "github.com/millrace/watermill-outbox/internal/brokertest/jetstream"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// forwardTopic is what the workload of these tests publishes to.
const forwardTopic = "changes"

// forwardLoad is how long the workload of these tests lasts.
var forwardLoad = time.Duration(number("OUTBOX_TEST_SECONDS", 3)) * time.Second

// faulty says of a broker's errors that are not known that they are the broker's,
// as those of the faults in these tests are.
func faulty(err error) forwarder.Fault {
	if fault := jetstream.Classify(err); fault != forwarder.FaultUnknown {
		return fault
	}
	return forwarder.FaultDestination
}

// forwardTest is an outbox with a workload, forwarded to brokers.
type forwardTest struct {
	*fixture

	work    *workload
	brokers map[string]brokertest.Broker // by destination
	// attempt is the highest that was seen.
	attempt atomic.Int64
}

func newForwardTest(t *testing.T, f *fixture) *forwardTest {
	t.Helper()
	return &forwardTest{fixture: f, work: newWorkload(t, f, forwardTopic, 20, 4), brokers: map[string]brokertest.Broker{}}
}

// write lets the workload go on until the context ends, whatever happens to the
// database.
func (f *forwardTest) write(ctx context.Context, seed uint64) {
	var writers sync.WaitGroup
	for i := range 4 {
		writers.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			for ctx.Err() == nil {
				if f.work.transaction(context.WithoutCancel(ctx), random, false) != nil {
					backoff.Wait(ctx, 20*time.Millisecond)
				}
			}
		})
	}
	writers.Wait()
}

// destination returns one that leads to a broker of its own.
func (f *forwardTest) destination(t *testing.T, name string, b brokertest.Broker, publisher message.Publisher) forwarder.Destination {
	t.Helper()
	require.NoError(t, b.Declare(t.Context(), forwardTopic))
	f.brokers[name] = b
	return forwarder.Destination{Name: name, Publisher: publisher, Classify: faulty, MaxInFlight: 16, MinBackoff: 10 * time.Millisecond, MaxBackoff: 200 * time.Millisecond}
}

// run runs a Forwarder until stop is called.
func (f *forwardTest) run(t *testing.T, consumer *outbox.Consumer, destinations ...forwarder.Destination) (running *forwarder.Forwarder, stop func()) {
	t.Helper()
	running, err := forwarder.New(forwarder.Config{
		Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.AllTopics()), Destinations: destinations,
		Middlewares: []message.HandlerMiddleware{func(next message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				delivery, _ := outbox.DeliveryFromCtx(msg.Context())
				for seen := f.attempt.Load(); int64(delivery.Attempt) > seen && !f.attempt.CompareAndSwap(seen, int64(delivery.Attempt)); {
					seen = f.attempt.Load()
				}
				return next(msg)
			}
		}},
	}, testLogger(t))
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- running.Run(context.Background()) }()
	select {
	case <-running.Running():
	case err := <-done:
		require.NoError(t, err, "it ended before it ran")
	}
	return running, func() {
		t.Helper()
		require.NoError(t, running.Close())
		require.NoError(t, <-done)
	}
}

// verdict compares what is in a broker with what is committed.
func (f *forwardTest) verdict(t *testing.T, name string) verdict {
	t.Helper()
	received, err := f.brokers[name].Received(t.Context(), forwardTopic)
	require.NoError(t, err)
	var l ledger
	for _, msg := range received {
		l.record(t, msg)
	}
	return f.work.judge(t, &l)
}

// requireForwarded waits until everything is in the brokers, and checks that it is
// in order there and that no message has spent an attempt.
func (f *forwardTest) requireForwarded(t *testing.T) map[string]verdict {
	t.Helper()
	verdicts := map[string]verdict{}
	for name := range f.brokers {
		assert.Eventually(t, func() bool {
			verdicts[name] = f.verdict(t, name)
			return verdicts[name].Lost == 0
		}, waitFor, 250*time.Millisecond, name)
		t.Logf("%-18s %s", name, verdicts[name])
		require.Positive(t, verdicts[name].Committed)
		require.Zero(t, verdicts[name].Lost, name)
		require.Zero(t, verdicts[name].Invented, name)
		require.Zero(t, verdicts[name].OutOfOrder, name)
	}
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
	require.LessOrEqual(t, f.attempt.Load(), int64(1), "an attempt was spent")
	return verdicts
}

// batchPublisher returns our publisher of batches to JetStream, through the proxy.
func batchPublisher(t *testing.T, url string) message.Publisher {
	t.Helper()
	publisher, err := connectBatches(url, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, publisher.Close()) })
	return publisher
}

// connectBatches returns one that closes its connection, too.
func connectBatches(url string, _ watermill.LoggerAdapter) (message.Publisher, error) {
	conn, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(brokertest.ReconnectInterval), nats.ReconnectJitter(0, 0), nats.ReconnectBufSize(-1),
		nats.Timeout(brokertest.PublishTimeout), nats.PingInterval(brokertest.PublishTimeout), nats.MaxPingsOutstanding(1))
	if err != nil {
		return nil, err
	}
	publisher, err := jetstream.NewPublisher(conn, jetstream.PublisherConfig{})
	if err != nil {
		conn.Close()
		return nil, err
	}
	return connectedPublisher{publisher, conn}, nil
}

// connectedPublisher has its connection to itself.
type connectedPublisher struct {
	*jetstream.Publisher

	conn *nats.Conn
}

func (p connectedPublisher) Close() error {
	defer p.conn.Close()
	return p.Publisher.Close()
}

// Every broker has its connections cut, with calls under way, and is ended hard and
// started again, while a workload goes on; and each is one destination of the same
// Forwarder, which is stopped and another takes its place. All is there in the end,
// in order, and what has de-duplication has nothing twice.
func TestForwardFaults(t *testing.T) {
	t.Parallel()

	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeAuto} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()

			f := newForwardTest(t, newFixture(t))
			consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = mode })
			var destinations []forwarder.Destination
			for _, kind := range brokerKinds {
				if mode == outbox.ModePoll && kind.name == "rabbitmq" {
					continue // its servers take long to start: one will do
				}
				b := newBroker(t, kind.start)
				d := f.destination(t, kind.name, b, brokerPublisher(t, b))
				if kind.name == "jetstream" {
					d.DeduplicationKey, d.PublishTimeout = forwarder.NATSMessageID, brokertest.PublishTimeout
				}
				destinations = append(destinations, d)
			}
			b := newBroker(t, asBroker(broker.Start))
			d := f.destination(t, "jetstream batches", b, batchPublisher(t, "nats://"+b.Proxy().Addr()))
			d.DeduplicationKey, d.PublishTimeout = forwarder.NATSMessageID, brokertest.PublishTimeout
			destinations = append(destinations, d)

			_, stop := f.run(t, consumer, destinations...)
			ctx, cancel := context.WithTimeout(t.Context(), forwardLoad)
			defer cancel()
			var disturbing sync.WaitGroup
			for _, b := range f.brokers {
				disturbing.Go(func() {
					for _, fault := range []func(){b.Proxy().CutAll, func() { assert.NoError(t, b.Restart(t.Context())) }, b.Proxy().CutAll} {
						if !backoff.Wait(ctx, forwardLoad/5) {
							break // the load is over
						}
						fault()
					}
				})
			}
			disturbing.Go(func() {
				backoff.Wait(ctx, forwardLoad/2)
				stop()
				_, stop = f.run(t, consumer, destinations...)
			})
			f.write(ctx, 1)
			disturbing.Wait()
			verdicts := f.requireForwarded(t)
			stop()
			for _, name := range []string{"jetstream", "jetstream batches"} {
				require.Zero(t, verdicts[name].Duplicated, name)
			}
		})
	}
}

// The database is restarted, hard, while a workload goes on.
func TestForwardDatabaseRestart(t *testing.T) {
	t.Parallel()

	own, server := newOwnFixture(t, pgtest.Options{})
	f := newForwardTest(t, own)
	b := newBroker(t, asBroker(broker.Start))
	d := f.destination(t, "jetstream", b, batchPublisher(t, b.(*broker.Broker).URL()))
	d.DeduplicationKey = forwarder.NATSMessageID
	_, stop := f.run(t, f.consumer(nil), d)
	ctx, cancel := context.WithTimeout(t.Context(), forwardLoad)
	defer cancel()
	var disturbing sync.WaitGroup
	disturbing.Go(func() {
		for _, mode := range []pgtest.Mode{pgtest.Fast, pgtest.Immediate} {
			backoff.Wait(ctx, forwardLoad/4)
			assert.NoError(t, server.Restart(t.Context(), mode))
		}
	})
	f.write(ctx, 2)
	disturbing.Wait()
	verdicts := f.requireForwarded(t)
	stop()
	require.Zero(t, verdicts["jetstream"].Duplicated)
}
