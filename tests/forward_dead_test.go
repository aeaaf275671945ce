package tests

import (
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
)

// die makes an end unreachable, until live.
func (e *end) die(t *testing.T) {
	t.Helper()
	require.NoError(t, e.broker.Proxy().RefuseNew(true))
	e.broker.Proxy().CutAll()
}

func (e *end) live(t *testing.T) {
	t.Helper()
	require.NoError(t, e.broker.Proxy().RefuseNew(false))
}

// One destination after the other is dead for a while. The others go on as if nothing
// were; the dead one is not hammered: each line that was under way finds out by itself,
// at most, and then nobody tries before the pause is over, however much comes. Nothing is
// given up, and when it is back it gets all that it missed, once and in order. Field cases
// F14 and F62.
func TestForwardDeadDestination(t *testing.T) {
	t.Parallel()

	const inFlight, keys = 4, 8
	r := newRelay(t, forwardTopic)
	r.outage()
	consumer := r.consumer(nil)
	sent := brokerMessages(2*keys*len(r.ends), keys)
	rounds := slices.Collect(slices.Chunk(sent, keys))
	for i, victim := range r.ends {
		for _, e := range r.ends {
			e.destination.MaxInFlight = inFlight
			e.destination.MinBackoff, e.destination.MaxBackoff = 10*time.Millisecond, 100*time.Millisecond
		}
		// For longer than any test lasts.
		victim.destination.Failures, victim.destination.MinBackoff, victim.destination.MaxBackoff = 2, 24*time.Hour, 24*time.Hour
		victim.die(t)
		before := victim.tap.allCalls()
		taken := victim.tap.missing(sent)

		running, stop := r.run(t, consumer, nil)
		r.publish(t, forwardTopic, rounds[2*i]...)
		r.awaitTaken(t, rounds[2*i], victim)
		status := func() forwarder.DestinationStatus { return running.Status().Destinations[i] }
		require.Eventually(t, func() bool { return status().Breaker == forwarder.BreakerOpen }, 2*waitFor, time.Millisecond, victim.name)
		require.Equal(t, victim.name, status().Name)
		require.Error(t, status().Err)
		r.publish(t, forwardTopic, rounds[2*i+1]...)
		r.awaitTaken(t, rounds[2*i+1], victim)
		require.LessOrEqual(t, victim.tap.allCalls()-before, inFlight, "%s: it is tried again and again", victim.name)
		require.Equal(t, taken, victim.tap.missing(sent), victim.name)
		require.Equal(t, forwarder.BreakerOpen, status().Breaker)
		require.Zero(t, status().Published)
		for _, e := range running.Status().Destinations {
			require.True(t, e.Name == victim.name || e.Breaker == forwarder.BreakerClosed, e.Name)
		}
		stop()
		victim.live(t)
	}
	r.requireNoLetters(t)
	for _, e := range r.ends {
		e.destination.MinBackoff, e.destination.MaxBackoff = 10*time.Millisecond, 100*time.Millisecond
	}
	_, stop := r.run(t, consumer, nil)
	r.awaitTaken(t, sent)
	stop()
	r.requireNoLetters(t)
	for _, e := range r.ends {
		e.requireOnce(t, forwardTopic, sent)
	}
}

// A dead destination that is tried again gets one message at a time for it, not one of
// each line that waits. Field case F62.
func TestForwardTriesAreOneAtATime(t *testing.T) {
	t.Parallel()

	const lines = 8
	r := newRelay(t, forwardTopic)
	r.outage()
	sent := brokerMessages(10*lines, lines)
	var mu sync.Mutex
	atOnce, most, tries, opened := map[*end]int{}, map[*end]int{}, map[*end]int{}, map[*end]bool{}
	states := map[forwarder.BreakerState]int{}
	var running *forwarder.Forwarder
	for i, e := range r.ends {
		e.destination.Failures = 1
		e.destination.MinBackoff, e.destination.MaxBackoff = time.Millisecond, 20*time.Millisecond
		e.tap.before = func(string, *message.Message) error {
			mu.Lock()
			defer mu.Unlock()
			if !opened[e] {
				return nil
			}
			tries[e]++
			atOnce[e]++
			most[e] = max(most[e], atOnce[e])
			mu.Unlock()
			// Others would come here meanwhile, if they could.
			state := running.Status().Destinations[i].Breaker
			mu.Lock()
			atOnce[e]--
			states[state]++
			return nil
		}
		e.die(t)
	}
	r.publish(t, forwardTopic, sent...)
	var stop func()
	running, stop = r.run(t, r.consumer(nil), nil)
	for i, e := range r.ends {
		// All lines have failed, or wait: whoever comes now is a try.
		require.Eventually(t, func() bool {
			status := running.Status().Destinations[i]
			return status.Breaker != forwarder.BreakerClosed && status.Waiting >= lines-1
		}, 2*waitFor, time.Millisecond, e.name)
		mu.Lock()
		opened[e] = true
		mu.Unlock()
	}
	for _, e := range r.ends {
		require.Eventually(t, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return tries[e] >= lines
		}, 2*waitFor, time.Millisecond, e.name)
		mu.Lock()
		require.Equal(t, 1, most[e], "%s: tries at once", e.name)
		opened[e] = false
		mu.Unlock()
		e.live(t)
	}
	mu.Lock()
	require.Equal(t, []forwarder.BreakerState{forwarder.BreakerHalfOpen}, slices.Collect(maps.Keys(states)))
	mu.Unlock()
	r.awaitTaken(t, sent)
	stop()
	r.requireNoLetters(t)
	for _, e := range r.ends {
		e.requireOnce(t, forwardTopic, sent)
	}
}

// All brokers stop answering, and publishers hang. No transaction of ours is open
// meanwhile, few connections are in use, and the application goes on; what hangs gets
// through when they answer again. Field case F14.
func TestForwardBlockedPublisherHoldsNoTransaction(t *testing.T) {
	t.Parallel()

	const connections = 3
	r := newRelay(t, forwardTopic)
	r.outage()
	sent := brokerMessages(64, 8)
	consumer := r.consumer(func(c *outbox.ConsumerConfig) { c.MaxConns = connections })
	for _, e := range r.ends {
		e.broker.Proxy().Pause()
	}
	r.publish(t, forwardTopic, sent...)
	running, stop := r.run(t, consumer, nil)
	for _, e := range r.ends {
		require.Eventually(t, func() bool { return e.tap.allCalls() > 0 }, 2*waitFor, time.Millisecond, e.name)
	}
	r.exec("CREATE TABLE business (n int)")
	for i := range 100 {
		r.exec("INSERT INTO business VALUES ($1)", i)
		s := r.sessions(t)
		require.Positive(t, s.All)
		require.LessOrEqual(t, s.All, connections)
		require.Zero(t, s.InTransaction)
		require.Less(t, s.Oldest, waitFor.Seconds())
	}
	for _, d := range running.Status().Destinations {
		require.Zero(t, d.Published, d.Name)
	}
	for _, e := range r.ends {
		e.broker.Proxy().Resume()
	}
	r.awaitTaken(t, sent)
	stop()
	r.requireNoLetters(t)
	for _, e := range r.ends {
		duplicates := requireInBroker(t, e.broker, forwardTopic, sent)
		require.True(t, duplicates == 0 || e.deduplication == "", "%s: duplicates", e.name)
	}
}

// A destination that takes nothing takes nothing into memory either: its lines in flight
// are as many as it may have, and rows are read up to what a subscription takes in, and
// two pages, however long the backlog. Field case F99.
func TestForwardTakesNoMoreThanItsBound(t *testing.T) {
	t.Parallel()

	const (
		inFlight, batch, page = 4, 3, 100
		// takenIn is what a subscription takes in, as outbox's minPending.
		takenIn = 1000
		total   = 4000
	)
	r := newRelay(t, forwardTopic)
	// A key for each ten: batches have some of a line.
	sent := brokerMessages(total, total/10)
	r.publish(t, forwardTopic, sent...)

	rows := &rowCounter{}
	db := r.pool.Config()
	db.ConnConfig.Tracer = rows
	blocked := r.consumerOn(db, func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModePoll })
	release := make(chan struct{})
	for _, e := range r.ends {
		e.destination.MaxInFlight = inFlight
		e.tap.before = func(string, *message.Message) error {
			<-release
			return nil
		}
	}
	bounded := func(group string) func(*forwarder.Config) {
		return func(c *forwarder.Config) {
			c.BatchSize = batch
			c.Source = forwarder.FromOutbox(blocked, outbox.SubscriberConfig{ConsumerGroup: group, PageSize: page}, outbox.AllTopics())
		}
	}
	running, stop := r.run(t, blocked, bounded(forwarder.DefaultConsumerGroup))
	for i, e := range r.ends {
		require.Eventually(t, func() bool {
			return running.Status().Destinations[i].InFlight == inFlight && e.tap.allCalls() > 0
		}, 2*waitFor, time.Millisecond, e.name)
	}
	require.Eventually(t, func() bool { return rows.n.Load() >= int64(len(r.ends)*takenIn) }, 2*waitFor, 5*time.Millisecond)

	// Somebody else reads all of it meanwhile, in pages as large.
	out := newPickyPublisher("")
	out.taken = make(chan string, total)
	_, stopFree := runForwarder(t, forwarder.Config{
		Source:       forwarder.FromOutbox(r.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "free", PageSize: page}, outbox.AllTopics()),
		Destinations: []forwarder.Destination{{Publisher: out}},
	}, r.logger)
	for range total {
		receiveOne(t, out.taken)
	}
	stopFree()
	require.LessOrEqual(t, rows.n.Load(), int64(len(r.ends)*(inFlight*batch+takenIn+3*page)), "rows that were read")
	for i, e := range r.ends {
		require.Equal(t, inFlight, running.Status().Destinations[i].InFlight, e.name)
		require.LessOrEqual(t, e.tap.allCalls(), inFlight, e.name)
	}
	close(release)
	some := sent[:page]
	r.awaitTaken(t, some)
	stop()
	r.requireNoLetters(t)
	for _, e := range r.ends {
		got := e.received(t, forwardTopic)
		// Not all are awaited; of each key the first ones are there, in order, once.
		next := map[string]int{}
		for _, msg := range got {
			n, err := strconv.Atoi(msg.Metadata["Number"])
			require.NoError(t, err)
			key := msg.Metadata[outbox.DefaultKeyMetadata]
			if _, any := next[key]; !any {
				next[key] = n % (total / 10)
			}
			require.Equal(t, next[key], n, "%s: %s", e.name, key)
			next[key] = n + total/10
		}
		require.GreaterOrEqual(t, len(got), len(some))
	}
}
