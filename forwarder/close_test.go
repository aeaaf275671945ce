package forwarder

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

// What is being published when the end comes gets CloseTimeout, and is acked if it
// gets through; nothing new begins, and nothing counts as failed.
func TestCloseLetsPublishersFinish(t *testing.T) {
	for name, test := range map[string]struct {
		takes time.Duration
		acked []int64
		ends  time.Duration
	}{
		"in time": {3 * time.Second, []int64{1, 2}, 2 * time.Second},
		// It does not heed its context, and is not waited for.
		"too late": {time.Minute, []int64{}, 5*time.Second + returnTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				source := storing(rowsOf("k", "l", "k", "k", "l", "")...)
				b := newBroker(nil)
				b.takes = test.takes
				f := run(t, Config{Source: source, Destinations: []Destination{{Publisher: b, MaxInFlight: 2}}})
				time.Sleep(time.Second)
				began := time.Now()
				f.end()
				require.Equal(t, test.ends, time.Since(began))
				require.Equal(t, 2, b.tries())
				require.Equal(t, test.acked, source.ackedIDs("default"))
				for i := range source.rows {
					require.Zero(t, source.failedAttempts("default", int64(i+1)))
				}
				time.Sleep(time.Hour) // until the publishers have returned
				require.Equal(t, 2, b.tries())
				require.Equal(t, test.acked, source.ackedIDs("default"))

				// The next one has the rest.
				b.takes = 0
				source.mu.Lock()
				source.feeds["default"].busy = map[string]bool{}
				source.mu.Unlock()
				run(t, Config{Source: source, Destinations: []Destination{{Publisher: b}}}).wait()
				require.Len(t, source.ackedIDs("default"), 6)
			})
		})
	}
}

// A publisher that heeds its context is cut off when CloseTimeout is over; its
// message is left, and has not failed.
func TestCloseCutsPublishersOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k", "k")...)
		b := newBroker(func(_ string, msg *message.Message) error {
			<-msg.Context().Done()
			return fmt.Errorf("publish: %w", msg.Context().Err())
		})
		f := run(t, Config{Source: source, Destinations: []Destination{{Publisher: b, PublishTimeout: time.Hour}}})
		time.Sleep(time.Second)
		began := time.Now()
		f.stop()
		f.wait()
		require.Equal(t, DefaultCloseTimeout, time.Since(began))
		require.Empty(t, source.ackedIDs("default"))
		require.Zero(t, source.failedAttempts("default", 1))
		require.Zero(t, f.Status().Destinations[0].FailingCount)
	})
}

// Whatever a Forwarder waits for, Close ends it at once.
func TestCloseInEveryState(t *testing.T) {
	hold := func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			<-msg.Context().Done()
			return nil, msg.Context().Err()
		}
	}
	states := map[string]func(source *fakeOutbox, c *Config){
		"nothing to do": func(source *fakeOutbox, _ *Config) { source.rows = nil },
		"breaker open":  func(_ *fakeOutbox, c *Config) { c.Destinations[0].Publisher = newBroker(always(errDown)) },
		"pause after a failure": func(_ *fakeOutbox, c *Config) {
			c.Destinations[0].Publisher, c.Destinations[0].Failures = newBroker(always(errOdd)), 1000
		},
		"retry in the source": func(source *fakeOutbox, c *Config) { source.pause = time.Hour; c.Route = routeFails },
		"poison topic out of order": func(_ *fakeOutbox, c *Config) {
			c.Destinations[0] = Destination{Publisher: newBroker(always(errDown)), PoisonTopic: "p"}
			c.Route = routeFails
		},
		"middleware": func(_ *fakeOutbox, c *Config) { c.Middlewares = []message.HandlerMiddleware{hold} },
		"batches": func(_ *fakeOutbox, c *Config) {
			c.Destinations[0].Publisher = &batchBroker{broker: newBroker(always(errDown))}
		},
	}
	for name, set := range states {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				source := storing(rowsOf("k", "k", "l", "m", "n", "")...)
				source.live = true
				config := Config{Source: source, Destinations: []Destination{{Publisher: newBroker(always(errOdd))}}, MaxAttempts: -1}
				set(source, &config)
				f := run(t, config)
				time.Sleep(time.Minute)
				synctest.Wait()
				dead := len(source.deadIDs("default"))
				began := time.Now()
				f.end()
				limit := time.Duration(0)
				if name == "middleware" {
					limit = DefaultCloseTimeout // it heeds the message's context
				}
				require.LessOrEqual(t, time.Since(began), limit+2*time.Millisecond, "but for a call that runs")
				require.Empty(t, source.ackedIDs("default"))
				require.Len(t, source.deadIDs("default"), dead)
				require.NoError(t, f.Close())
				require.Equal(t, 1, source.feed("default").closed)
			})
		})
	}
}

func routeFails(*message.Message, string) ([]Target, error) { return nil, errOdd }

func TestCloseBeforeRunAndRunTwice(t *testing.T) {
	bubble(t, func(t *testing.T) {
		config := Config{Source: storing(), Destinations: []Destination{{Publisher: newBroker(nil)}}}
		f, err := New(config, nil)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.NoError(t, f.Close())
		require.ErrorIs(t, f.Run(t.Context()), ErrClosed)

		f, err = New(config, nil)
		require.NoError(t, err)
		select {
		case <-f.Running():
			require.Fail(t, "it does not run yet")
		default:
		}
		require.NoError(t, f.Run(t.Context()))
		<-f.Running()
		require.ErrorIs(t, f.Run(t.Context()), ErrRunning)
		require.NoError(t, f.Close())
	})
}

// The end may come while the source is being subscribed to.
func TestCloseWhileSubscribing(t *testing.T) {
	for name, end := range map[string]func(f *Forwarder, cancel func()){
		"by Close":       func(f *Forwarder, _ func()) { _ = f.Close() },
		"by the context": func(_ *Forwarder, cancel func()) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f, err := New(Config{
					Source: FromSubscriber(stuckSubscriber{}, "t"), Destinations: []Destination{{Publisher: newBroker(nil)}},
				}, nil)
				require.NoError(t, err)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				ended := make(chan error, 1)
				go func() { ended <- f.Run(ctx) }()
				synctest.Wait()
				end(f, cancel)
				require.NoError(t, <-ended)
			})
		})
	}
}

// stuckSubscriber subscribes until the context ends.
type stuckSubscriber struct{}

func (stuckSubscriber) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (stuckSubscriber) Close() error { return nil }

// What cannot be subscribed to is an error of Run, and leaves nothing open.
func TestRunReportsTheSource(t *testing.T) {
	bubble(t, func(t *testing.T) {
		away := errors.New("away")
		source := storing(rowsOf("k")...)
		source.refuse = func(destination string) error {
			if destination == "b" {
				return away
			}
			return nil
		}
		b := newBroker(nil)
		f, err := New(Config{Source: source, Destinations: []Destination{{Name: "a", Publisher: b}, {Name: "b", Publisher: b}}}, nil)
		require.NoError(t, err)
		require.ErrorIs(t, f.Run(t.Context()), away)
		require.Equal(t, 1, source.feed("a").closed)
		require.Zero(t, b.tries())
		select {
		case <-f.Running():
			require.Fail(t, "it never ran")
		default:
		}
	})
}

// A message that is another process's is not published any more, whether it waits
// or is being published; what is behind it neither.
func TestALostLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k", "k", "l", "", "", "")...)
		source.live = true
		b := newBroker(always(errDown))
		f := run(t, Config{Source: source, Destinations: []Destination{{Publisher: b, MaxInFlight: 4}}})
		time.Sleep(time.Minute)
		taken := errors.New("taken over")
		source.feed("default").lose(taken)
		synctest.Wait()
		tries := b.tries()
		b.become(nil)
		time.Sleep(time.Hour)
		require.Equal(t, tries, b.tries())
		require.Empty(t, b.took())
		require.Zero(t, f.Status().Destinations[0].FailingCount, "they are not ours")
		require.Zero(t, b.ended)
		f.wait()
	})
}

// hanging is a publisher whose calls for a line hang until they are released,
// whatever their contexts say. All others are refused until the first one hangs.
type hanging struct {
	*broker

	line    string
	hangs   chan struct{}
	release chan struct{}
}

func newHanging(line string) *hanging {
	h := &hanging{broker: newBroker(nil), line: line, hangs: make(chan struct{}), release: make(chan struct{})}
	var once sync.Once
	h.verdict = func(_ string, msg *message.Message) error {
		if strings.HasPrefix(msg.UUID, line) && h.broker.tried(msg.UUID) > DefaultFailures {
			once.Do(func() { close(h.hangs) })
			<-h.release
			return errDown
		}
		select {
		case <-h.hangs:
			return nil
		default:
			return errDown
		}
	}
	return h
}

// A publisher that hangs as the one that tries keeps the others out for no longer
// than twice its time, and Close returns.
func TestAPublisherThatHangsAsItTries(t *testing.T) {
	for name, publisher := range map[string]func(h *hanging) message.Publisher{
		"one by one": func(h *hanging) message.Publisher { return h.broker },
		"batches":    func(h *hanging) message.Publisher { return &batchBroker{broker: h.broker} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				source := storing(rowsOf("k", "l", "m", "k", "l", "m")...)
				source.live = true
				h := newHanging("k")
				defer close(h.release)
				f := run(t, Config{Source: source, Destinations: []Destination{{
					Publisher: publisher(h), PublishTimeout: time.Minute, MaxBackoff: time.Second,
				}}})
				<-h.hangs
				require.Empty(t, source.ackedIDs("default"))
				time.Sleep(2*time.Minute + 2*time.Second)
				require.ElementsMatch(t, []string{"l2", "l5", "m3", "m6"}, h.uuids())
				require.Equal(t, BreakerClosed, f.Status().Destinations[0].Breaker)
				began := time.Now()
				f.end()
				require.LessOrEqual(t, time.Since(began), DefaultCloseTimeout+returnTimeout)
				require.Equal(t, []int64{2, 3, 5, 6}, source.ackedIDs("default"))
			})
		})
	}
}

// Calls of PublishBatch that hang keep their own lines, and no others: there are as
// many more calls.
func TestBatchesThatHang(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing()
		source.live = true
		release := make(chan struct{})
		defer close(release)
		b := newBatchBroker(func(_ string, msg *message.Message) error {
			if msg.UUID[0] == 'h' {
				<-release
			}
			return nil
		})
		f := run(t, Config{Source: source, Destinations: []Destination{{Publisher: b, PublishTimeout: time.Minute}}})
		for _, r := range rowsOf("ha", "hb", "hc", "hd", "k", "l", "k", "l") {
			source.add(r)
			synctest.Wait()
		}
		require.Empty(t, b.took(), "all calls hang")
		// Each of the two lets another begin: one with hc, hd, k and l, the next with
		// what comes behind.
		time.Sleep(2*time.Minute + time.Second)
		for _, r := range []row{{number: 11, topic: "t", key: "x", uuid: "x1"}, {number: 12, topic: "t", key: "y", uuid: "y1"}} {
			source.add(r)
			synctest.Wait()
		}
		time.Sleep(10 * time.Minute)
		require.Subset(t, b.uuids(), []string{"x1", "y1"})
		// What hangs is in no call any more that others would wait for.
		calls := b.callsSoFar()
		source.add(row{number: 13, topic: "t", key: "z", uuid: "z1"})
		synctest.Wait()
		require.Equal(t, calls+1, b.callsSoFar())
		began := time.Now()
		f.end()
		require.LessOrEqual(t, time.Since(began), DefaultCloseTimeout+returnTimeout)
	})
}
