package forwarder

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// UUID, metadata and payload arrive as they were, lines in order.
func TestForwards(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k", "l", "k", "", "l", "k")...)
		source.rows[0].metadata = message.Metadata{"a": "1"}
		b := newBroker(nil)
		run(t, Config{Source: source, Destinations: []Destination{{Publisher: b}}}).wait()

		require.Len(t, b.took(), 6)
		require.Contains(t, b.took(), published{"t", "k1", "payload of k1", message.Metadata{"a": "1"}, time.Millisecond})
		order := map[string][]string{}
		for _, p := range b.took() {
			require.Equal(t, "payload of "+p.uuid, p.payload)
			order[p.uuid[:1]] = append(order[p.uuid[:1]], p.uuid)
		}
		require.Equal(t, map[string][]string{"k": {"k1", "k3", "k6"}, "l": {"l2", "l5"}, "4": {"4"}}, order)
		require.Equal(t, []int64{1, 2, 3, 4, 5, 6}, source.ackedIDs("default"))
		require.Zero(t, b.closed, "the publisher is the caller's")
	})
}

// While a destination is down no attempt is spent, and it is left alone but for one
// message at a time.
func TestAnOutageSpendsNothing(t *testing.T) {
	for name, failure := range map[string]error{"known by its type": errDown, "unknown": errOdd} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				keys := make([]string, 200)
				for i := range keys {
					keys[i] = fmt.Sprint("k", i%40, "-")
				}
				source := storing(rowsOf(keys...)...)
				b := newBroker(always(failure))
				f := run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{Publisher: b, MaxInFlight: 30}}})
				time.Sleep(time.Hour)
				require.Empty(t, b.took())
				require.LessOrEqual(t, b.tries(), 30+2*3600/8+50, "one line after the other tries, after at least 8 s; a suspect is followed by the next of its line")
				status := f.Status().Destinations[0]
				require.NotEqual(t, BreakerClosed, status.Breaker)
				require.ErrorIs(t, status.Err, failure)
				require.InDelta(t, time.Hour, time.Since(status.Since), float64(time.Second), "since it left the closed state")
				require.InDelta(t, 30, status.InFlight, 1, "one may be on its way back")
				require.GreaterOrEqual(t, status.FailingCount, 30)
				require.Zero(t, status.Failing[0].Attempts)

				b.become(nil)
				f.wait()
				require.Len(t, b.took(), 200)
				require.Empty(t, source.deadIDs("default"))
				for i := range source.rows {
					require.Zero(t, source.failedAttempts("default", int64(i+1)))
				}
				require.Zero(t, f.Status().Destinations[0].FailingCount)
				require.Equal(t, BreakerClosed, f.Status().Destinations[0].Breaker)
			})
		})
	}
}

// A message that cannot pass spends its attempts, as others show that the
// destination is up, and holds back its line alone.
func TestAPoisonedMessageIsIsolated(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k", "k", "l")...)
		source.live = true
		b := newBroker(only("k1", errOdd))
		b.takes = time.Second / 2
		f := run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{Publisher: b, MaxInFlight: 3}}})
		for i := range 60 {
			source.add(row{number: int64(i + 10), topic: "t", uuid: fmt.Sprint("free", i)})
			time.Sleep(time.Second / 4)
		}
		f.end()
		require.Equal(t, []int64{1}, source.deadIDs("default"))
		require.ErrorIs(t, source.reason("default", 1), errOdd)
		require.Equal(t, 3, source.failedAttempts("default", 1))
		require.Equal(t, 4, b.tried("k1"), "the first failure proves nothing")
		require.Len(t, b.took(), 62)
		require.Zero(t, source.failedAttempts("default", 2))
		require.Equal(t, 1, b.tried("k2"))
	})
}

// A line with a message that cannot pass is all there is: what is behind it shows
// that the destination is up.
func TestTheNextOfTheLineProves(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k", "k", "k")...)
		b := newBroker(only("k1", errOdd))
		run(t, Config{Source: source, MaxAttempts: 4, Destinations: []Destination{{Publisher: b}}}).wait()
		require.Equal(t, []string{"k2", "k3"}, b.uuids())
		require.Equal(t, []int64{1}, source.deadIDs("default"))
		require.ErrorContains(t, source.reason("default", 1), "the next message of its line was accepted")
		require.Equal(t, 1, b.tried("k2"))
	})
}

// An outage whose errors say nothing, with a single line: when the destination
// comes back, its first message goes first, and is not taken for what failed. The
// next of the line was once tried in its place, and one time in two found the
// destination back and condemned a message that was well.
func TestASingleLineOutlivesAnOutage(t *testing.T) {
	for tries := range 12 {
		t.Run(fmt.Sprint("back after ", tries, " more"), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				source := storing(rowsOf("k", "k", "k")...)
				b := newBroker(always(errOdd))
				f := run(t, Config{Source: source, MaxAttempts: 2, Destinations: []Destination{{Publisher: b}}})
				for before := 0; before < 8+tries; before++ {
					for n := b.tries(); b.tries() == n; {
						time.Sleep(10 * time.Millisecond)
					}
					synctest.Wait()
				}
				time.Sleep(2 * time.Millisecond) // the try has failed, and the one with the next behind it
				synctest.Wait()
				b.become(nil)
				f.wait()
				require.Equal(t, []string{"k1", "k2", "k3"}, b.uuids())
				require.Empty(t, source.deadIDs("default"))
				require.Zero(t, source.failedAttempts("default", 1))
			})
		})
	}
}

// A lone message that fails waits, and is seen to.
func TestALoneMessageWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k")...)
		source.live = true
		b := newBroker(only("k1", errOdd))
		f := run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{Publisher: b}}})
		time.Sleep(time.Hour)
		require.Zero(t, source.failedAttempts("default", 1))
		status := f.Status().Destinations[0]
		require.Equal(t, 1, status.FailingCount)
		failing := status.Failing[0]
		require.Equal(t, "k1", failing.UUID)
		require.Equal(t, "t", failing.Topic)
		require.Equal(t, "k", failing.OrderingKey)
		require.Equal(t, b.tried("k1"), failing.Failures)
		require.ErrorIs(t, failing.Err, errOdd)

		// Messages of other lines come, and prove its fault.
		for i := range 20 {
			source.add(row{number: int64(10 + i), topic: "t", uuid: fmt.Sprint("free", i)})
			time.Sleep(time.Minute)
		}
		require.Equal(t, []int64{1}, source.deadIDs("default"))
		require.Zero(t, f.Status().Destinations[0].FailingCount)
		f.end()
	})
}

// What comes behind a message that waits proves its fault, too: it is handed out
// again with what there is by now. So is one that has spent attempts, though nothing
// else is left to show that the destination is up.
func TestWhatComesLaterProves(t *testing.T) {
	t.Run("behind a lone message", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			source := storing(rowsOf("k")...)
			source.live = true
			b := newBroker(only("k1", errOdd))
			f := run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{Publisher: b}}})
			time.Sleep(time.Hour)
			require.Zero(t, source.failedAttempts("default", 1))
			require.InDelta(t, 3600/9, b.tried("k1"), 60, "still once a pause")
			source.add(row{number: 2, topic: "t", key: "k", uuid: "k2"})
			time.Sleep(time.Minute)
			require.Equal(t, []int64{1}, source.deadIDs("default"))
			require.Equal(t, []string{"k2"}, b.uuids())
			require.Zero(t, f.Status().Destinations[0].FailingCount)
			f.end()
		})
	})
	t.Run("behind one that has spent attempts", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			source := storing(rowsOf("k", "k", "")...)
			source.pause = time.Minute // the other one has long gone then
			b := newBroker(only("k1", errOdd))
			b.takes = 200 * time.Millisecond
			run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{Publisher: b}}}).wait()
			require.Equal(t, []int64{1}, source.deadIDs("default"))
			require.Equal(t, []string{"3", "k2"}, b.uuids())
		})
	})
	t.Run("which recovers", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			source := storing(rowsOf("k")...)
			b := newBroker(always(errOdd))
			f := run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{Publisher: b}}})
			time.Sleep(time.Hour)
			b.become(nil)
			f.wait()
			require.Equal(t, []string{"k1"}, b.uuids())
			require.Empty(t, source.deadIDs("default"))
			require.Zero(t, f.Status().Destinations[0].FailingCount)
		})
	})
}

// As many messages as may be in flight cannot pass, and nobody says so: they make
// room for those who can show that the destination is up.
func TestSuspectsMakeRoom(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("odd", "odd", "odd")...)
		for i := range 3 {
			source.rows[i].key = ""
		}
		source.rows, source.live = source.rows[:3], true
		b := newBroker(func(_ string, msg *message.Message) error {
			if msg.UUID[:1] == "o" {
				return errOdd
			}
			return nil
		})
		b.takes = time.Second / 2
		f := run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{Publisher: b, MaxInFlight: 3}}})
		time.Sleep(time.Hour)
		require.Empty(t, source.deadIDs("default"))
		for i := range 20 {
			source.add(row{number: int64(100 + i), topic: "t", uuid: fmt.Sprint("free", i)})
			time.Sleep(time.Minute)
		}
		require.Equal(t, []int64{1, 2, 3}, source.deadIDs("default"))
		require.Len(t, b.took(), 20)
		f.end()
	})
}

// A failure that takes long began when the destination may still have been down:
// what is accepted after it does not condemn it.
func TestSlowFailuresCondemnNothing(t *testing.T) {
	for after := range 10 {
		t.Run(fmt.Sprint("back after ", after, " s more"), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				source := storing(rowsOf("k", "k", "k")...)
				back := time.Now().Add(10*time.Minute + time.Duration(after)*time.Second + 123*time.Millisecond)
				b := newBroker(nil)
				b.takes = 0
				b.verdict = func(string, *message.Message) error {
					if time.Now().Before(back) {
						time.Sleep(5 * time.Second)
						return errOdd
					}
					return nil
				}
				run(t, Config{Source: source, MaxAttempts: 2, Destinations: []Destination{{Publisher: b, MinBackoff: 1, MaxBackoff: 1}}}).wait()
				require.Equal(t, []string{"k1", "k2", "k3"}, b.uuids())
				require.Empty(t, source.deadIDs("default"))
			})
		})
	}
}

func TestPingProves(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k")...)
		var up atomic.Bool
		b := newBroker(only("k1", errOdd))
		f := run(t, Config{Source: source, MaxAttempts: 3, Destinations: []Destination{{
			Publisher: b, Ping: func(ctx context.Context) error {
				if _, ok := ctx.Deadline(); !ok {
					panic("no deadline") // counts as down
				}
				if up.Load() {
					return nil
				}
				return errDown
			},
		}}})
		time.Sleep(time.Hour)
		require.Zero(t, source.failedAttempts("default", 1))
		up.Store(true)
		f.wait()
		require.Equal(t, []int64{1}, source.deadIDs("default"))
		require.Equal(t, 3, source.failedAttempts("default", 1))
	})
}

// What the publisher, or Classify, says is for good is a dead letter at once.
func TestPermanentFailuresDieAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		tooLarge := errors.New("too large")
		source := storing(rowsOf("k", "k", "k", "k")...)
		b := newBroker(func(_ string, msg *message.Message) error {
			switch msg.UUID {
			case "k1":
				return outbox.Permanent(errOdd)
			case "k3":
				return fmt.Errorf("publish: %w", tooLarge)
			}
			return nil
		})
		run(t, Config{Source: source, Destinations: []Destination{{Publisher: b, Classify: func(err error) Fault {
			if errors.Is(err, tooLarge) {
				return FaultPermanent
			}
			return Classify(err)
		}}}}).wait()
		require.Equal(t, []string{"k2", "k4"}, b.uuids())
		require.Equal(t, []int64{1, 3}, source.deadIDs("default"))
		require.Equal(t, 1, b.tried("k1"))
		require.Equal(t, 1, b.tried("k3"))
	})
}

// A destination that is dead, or slow, delays only itself.
func TestDestinationsAreIndependent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k", "k", "l", "m", "")...)
		good, dead, slow := newBroker(nil), newBroker(always(errDown)), newBroker(nil)
		slow.takes = time.Hour
		f := run(t, Config{Source: source, Destinations: []Destination{
			{Name: "good", Publisher: good},
			{Name: "dead", Publisher: dead},
			{Name: "slow", Publisher: slow, PublishTimeout: 2 * time.Hour},
		}})
		time.Sleep(time.Minute)
		require.Len(t, good.took(), 5)
		require.Equal(t, []int64{1, 2, 3, 4, 5}, source.ackedIDs("good"))
		require.True(t, f.Status().Destinations[0].Ended)
		require.False(t, f.Status().Destinations[1].Ended)
		require.Empty(t, source.ackedIDs("dead"))
		dead.become(nil)
		f.wait()
		require.Len(t, slow.took(), 5)
		require.Len(t, dead.took(), 5)
	})
}

// Wherever it happens, a panic is an error of the message.
func TestPanicsAreErrors(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("middleware", "route", "publish", "nil", "classify", "well", "well", "well", "well", "well", "well")...)
		b := newBroker(func(_ string, msg *message.Message) error {
			switch msg.UUID {
			case "publish3":
				panic("publish")
			case "classify5":
				return errOdd
			}
			return nil
		})
		b.takes = time.Second
		run(t, Config{
			Source: source, MaxAttempts: 2,
			Destinations: []Destination{{Publisher: b, Classify: func(err error) Fault {
				if errors.Is(err, errOdd) {
					panic("classify")
				}
				return Classify(err)
			}}},
			Middlewares: []message.HandlerMiddleware{func(next message.HandlerFunc) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					switch msg.UUID {
					case "middleware1":
						panic("middleware")
					case "nil4":
						return []*message.Message{nil}, nil
					}
					return next(msg)
				}
			}},
			Route: func(msg *message.Message, _ string) ([]Target, error) {
				if msg.UUID == "route2" {
					panic("route")
				}
				return []Target{{}}, nil
			},
		}).wait()
		require.Len(t, b.took(), 6)
		require.Equal(t, []int64{1, 2, 3, 4, 5}, source.deadIDs("default"))
		var panicked *PanicError
		for id := int64(1); id <= 4; id++ {
			require.ErrorAs(t, source.reason("default", id), &panicked)
			require.NotEmpty(t, panicked.Stack)
		}
		require.ErrorIs(t, source.reason("default", 5), errOdd)
		require.Equal(t, 2, source.failedAttempts("default", 1))
		require.Equal(t, 1, source.failedAttempts("default", 2), "a route that panics would do so again")
	})
}

// What is out is bounded.
func TestMemoryIsBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		keys := make([]string, 1000)
		for i := range keys {
			keys[i] = fmt.Sprint("k", i%100)
		}
		source := storing(rowsOf(keys...)...)
		b := newBroker(always(errDown))
		f := run(t, Config{Source: source, BatchSize: 3, Destinations: []Destination{{Publisher: b, MaxInFlight: 7}}})
		time.Sleep(time.Minute)
		require.Equal(t, 7, source.mostOut("default"))
		require.LessOrEqual(t, b.mostAtOnce(), 7)
		require.Equal(t, 7, f.Status().Destinations[0].InFlight)
		f.end()
	})
}

// There are as many workers as were ever needed at once, and one that waits: neither
// is one begun for each batch, nor does one that hangs keep others from being served.
func TestWorkers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		keys := make([]string, 60)
		for i := range keys {
			keys[i] = string(rune('a' + i%3))
		}
		source := storing(rowsOf(keys...)...)
		source.live = true
		b := newBroker(nil)
		f := run(t, Config{Source: source, BatchSize: 1, Destinations: []Destination{{Publisher: b}}})
		synctest.Wait()
		require.Equal(t, 3, f.Status().Destinations[0].InFlight)
		time.Sleep(time.Minute)
		require.Len(t, b.took(), 60)
		require.Zero(t, f.Status().Destinations[0].InFlight)
		require.GreaterOrEqual(t, f.pumps[0].idle.Load(), int64(4))
		require.LessOrEqual(t, f.pumps[0].idle.Load(), int64(7), "three more may have acked, and not yet have waited")
		f.end()
	})
}

// A worker takes the next line into the room of the last one, unless that was large.
func TestLinesShareTheirRoom(t *testing.T) {
	t.Parallel()

	p := &pump{feed: &endless{}}
	batch := make([]*message.Message, DefaultBatchSize)
	for i := range batch {
		batch[i] = message.NewMessage("u", nil)
	}
	line := p.consume(batch, nil)
	require.Len(t, line, DefaultBatchSize)
	require.Equal(t, DefaultBatchSize, cap(line), "more is not kept")
	again := p.consume(batch[1:], line[:0])
	require.Same(t, &line[0], &again[0])
}
