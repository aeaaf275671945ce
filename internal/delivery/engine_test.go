package delivery_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
	"weak"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/window"
)

// bench is an engine with its surroundings, in virtual time.
type bench struct {
	engine  *delivery.Engine
	out     chan *message.Message
	pages   chan window.Page
	tracker *delivery.Tracker
	store   *store
	stop    context.CancelFunc
	lose    context.CancelCauseFunc
	done    chan struct{}
}

// store keeps verdicts, and fails as often as it is told to.
type store struct {
	mu       sync.Mutex
	verdicts []delivery.Verdict
	died     []delivery.Verdict
	saved    []window.State
	buried   map[int64]bool
	failures int
	tracker  *delivery.Tracker
}

func (s *store) Save(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failures > 0 {
		s.failures--
		return errors.New("away")
	}
	state, version, _ := s.tracker.State()
	s.tracker.Stored(version)
	s.saved = append(s.saved, state)
	return nil
}

func (s *store) Settle(_ context.Context, entry *delivery.Entry, verdict delivery.Verdict) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failures > 0 {
		s.failures--
		return errors.New("away")
	}
	s.verdicts = append(s.verdicts, verdict)
	entry.Settled()
	return nil
}

func (s *store) Buried(_ context.Context, row window.Row) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buried[row.ID], nil
}

func (s *store) Nudge() { _ = s.Save(context.Background()) }

// settled returns the verdicts so far.
func (s *store) settled() []delivery.Verdict {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.verdicts)
}

type reasonKey struct{}

func start(t *testing.T, change ...func(*delivery.Engine)) *bench {
	return startAt(t, window.State{}, false, change...)
}

func startAt(t *testing.T, state window.State, unclean bool, change ...func(*delivery.Engine)) *bench {
	b := &bench{
		out: make(chan *message.Message), pages: make(chan window.Page), done: make(chan struct{}),
		store: &store{buried: map[int64]bool{}},
	}
	stop, cancel := context.WithCancel(t.Context())
	lease, lose := context.WithCancelCause(t.Context())
	b.stop, b.lose = cancel, lose
	b.engine = &delivery.Engine{
		Policy: delivery.Policy{
			MaxInFlight: 1, Pending: 100, PendingBytes: 1 << 20, Grace: time.Minute,
			Backoff: backoff.Policy{Min: time.Second, Max: 4 * time.Second},
		},
		Out: b.out, Base: context.Background(), Stop: stop,
		Wrap: func(ctx context.Context, _ *window.Row, attempt int) context.Context {
			return context.WithValue(ctx, reasonKey{}, fmt.Errorf("attempt %d", attempt))
		},
		Reason: func(ctx context.Context) error {
			err, _ := ctx.Value(reasonKey{}).(error)
			return err
		},
		Valid: func() bool { return lease.Err() == nil },
		Store: b.store, Died: func(v delivery.Verdict) { b.store.died = append(b.store.died, v) },
		Logger: watermill.NopLogger{},
	}
	for _, change := range change {
		change(b.engine)
	}
	b.tracker = delivery.NewTracker(state, b.engine.MaxAttempts > 0, unclean)
	b.store.tracker = b.tracker
	go func() {
		defer close(b.done)
		b.engine.Run(lease, b.tracker, b.pages)
	}()
	t.Cleanup(func() {
		cancel()
		lose(nil)
		<-b.done
	})
	return b
}

// ordered makes an engine of that ordering, with so many in flight.
func ordered(ordering delivery.Ordering, inFlight int) func(*delivery.Engine) {
	return func(e *delivery.Engine) { e.Ordering, e.MaxInFlight = ordering, inFlight }
}

func attempts(n int) func(*delivery.Engine) {
	return func(e *delivery.Engine) { e.MaxAttempts = n }
}

// inFlight returns the messages that come without an ack of others.
func (b *bench) inFlight() (messages []*message.Message) {
	for {
		synctest.Wait()
		select {
		case msg := <-b.out:
			messages = append(messages, msg)
		default:
			return messages
		}
	}
}

// ids returns which rows the messages are of.
func ids(messages ...*message.Message) (ids []int64) {
	for _, msg := range messages {
		ids = append(ids, int64(msg.UUID[0]-'a'))
	}
	slices.Sort(ids)
	return ids
}

// keyed returns a page of rows with keys, "" for none; their ids count from first.
func keyed(first int64, keys ...string) window.Page {
	list := make([]int64, len(keys))
	for i := range keys {
		list[i] = first + int64(i)
	}
	page := rows(list...)
	for i, key := range keys {
		page.Rows[i].Key = key
	}
	return page
}

func rows(ids ...int64) window.Page {
	var page window.Page
	for _, id := range ids {
		page.Rows = append(page.Rows, window.Row{ID: id, UUID: string(rune('a' + id)), Metadata: []byte("{}")})
	}
	page.End = window.Position{Step: window.Idle, Floor: ids[len(ids)-1]}
	return page
}

func TestStrictWaitsForTheAck(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1, 2)
		first := <-b.out
		synctest.Wait()
		select {
		case <-b.out:
			require.Fail(t, "the second message came before the first was acked")
		default:
		}
		require.NoError(t, first.Context().Err())
		first.Ack()
		second := <-b.out
		require.ErrorIs(t, first.Context().Err(), context.Canceled)
		require.Equal(t, "c", second.UUID)
		second.Ack()
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Equal(t, int64(2), state.Position.Floor)
	})
}

func TestStrictRedeliversAfterGrowingPauses(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1)
		msg := <-b.out
		for _, ceiling := range []time.Duration{1, 2, 4, 4} {
			ceiling *= time.Second
			began := time.Now()
			msg.Nack()
			again := <-b.out
			require.NotSame(t, msg, again)
			require.Equal(t, msg.UUID, again.UUID)
			require.ErrorIs(t, msg.Context().Err(), context.Canceled)
			require.LessOrEqual(t, time.Since(began), ceiling)
			require.GreaterOrEqual(t, time.Since(began), ceiling*4/5)
			msg = again
		}
		state, _, _ := b.tracker.State()
		require.Equal(t, []window.Hole{{ID: 1, Attempts: 4}}, state.Holes, "what failed is counted")
		msg.Ack()
		synctest.Wait()
		state, _, _ = b.tracker.State()
		require.Empty(t, state.Holes)
		require.Equal(t, int64(1), state.Position.Floor)
	})
}

func TestStrictStopDuringBackoffReturnsAtOnce(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1)
		(<-b.out).Nack()
		synctest.Wait()
		began := time.Now()
		b.stop()
		<-b.done
		require.Zero(t, time.Since(began))
	})
}

func TestStrictGivesTheMessageInFlightItsGrace(t *testing.T) {
	t.Parallel()

	t.Run("acked in time", func(t *testing.T) {
		t.Parallel()

		synctest.Test(t, func(t *testing.T) {
			b := start(t)
			b.pages <- rows(1, 2)
			msg := <-b.out
			b.stop()
			time.Sleep(59 * time.Second)
			require.NoError(t, msg.Context().Err())
			msg.Ack()
			<-b.done
			_, version, urgent := b.tracker.State()
			require.Equal(t, uint64(1), version, "the ack was not recorded")
			require.Equal(t, uint64(1), urgent)
		})
	})
	t.Run("never acked", func(t *testing.T) {
		t.Parallel()

		synctest.Test(t, func(t *testing.T) {
			b := start(t)
			b.pages <- rows(1)
			msg := <-b.out
			began := time.Now()
			b.stop()
			<-b.done
			require.Equal(t, time.Minute, time.Since(began))
			require.Error(t, msg.Context().Err())
			_, version, _ := b.tracker.State()
			require.Zero(t, version)
		})
	})
	t.Run("nobody has taken it", func(t *testing.T) {
		t.Parallel()

		synctest.Test(t, func(t *testing.T) {
			b := start(t)
			b.pages <- rows(1)
			synctest.Wait()
			began := time.Now()
			b.stop()
			<-b.done
			require.Zero(t, time.Since(began))
		})
	})
}

func TestStrictIgnoresAcksOfALostLease(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1, 2)
		msg := <-b.out
		cause := errors.New("taken by another process")
		b.lose(cause)
		synctest.Wait()
		require.ErrorIs(t, context.Cause(msg.Context()), cause)
		msg.Ack()
		<-b.done
		_, version, _ := b.tracker.State()
		require.Zero(t, version)
	})
}

// What can never become a message is a dead letter at once, with its bytes.
func TestUndecodableRowsDie(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		page := rows(1, 2, 3)
		page.Rows[0].Metadata = []byte("[]")
		page.Rows[2].Metadata = []byte(`{"a":1}`)
		b.pages <- page
		msg := <-b.out
		require.Equal(t, []int64{2}, ids(msg))
		msg.Ack()
		synctest.Wait()
		verdicts := b.store.settled()
		require.Len(t, verdicts, 2)
		for i, id := range []int64{1, 3} {
			require.Equal(t, id, verdicts[i].Row.ID)
			require.True(t, verdicts[i].Dead)
			require.Nil(t, verdicts[i].Metadata)
			require.Contains(t, verdicts[i].Error, "cannot become a message")
		}
		state, _, _ := b.tracker.State()
		require.Empty(t, state.Holes)
		require.Equal(t, int64(3), state.Position.Floor)
	})
}

func TestHolesAreFilled(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := startAt(t, window.State{Position: at(9), Holes: []window.Hole{{ID: 1, Attempts: 2}, {ID: 2}}}, false)
		page := rows(1)
		page.Holes, page.Gone = true, []window.Hole{{ID: 2}}
		b.pages <- page
		msg := <-b.out
		require.EqualError(t, msg.Context().Value(reasonKey{}).(error), "attempt 3", "it had two before")
		msg.Ack()
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Empty(t, state.Holes)
		require.Equal(t, int64(9), state.Position.Floor, "a hole moved the position")
	})
}

// A key goes in order, keys in parallel, and what has no key waits for nothing.
// A key whose message failed waits for it; the others do not (F06).
func TestKeysGoInParallel(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t, ordered(delivery.ByKey, 10))
		b.pages <- keyed(1, "k", "k", "k", "l", "l", "", "")
		first := b.inFlight()
		require.Equal(t, []int64{1, 4, 6, 7}, ids(first...))
		for _, msg := range first {
			if ids(msg)[0] == 1 {
				msg.Nack()
			} else {
				msg.Ack()
			}
		}
		next := b.inFlight()
		require.Equal(t, []int64{5}, ids(next...), "the key of the failed message waits")
		next[0].Ack()
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Equal(t, []window.Hole{{ID: 1, Attempts: 1}, {ID: 2}, {ID: 3}}, state.Holes)
		list, n := b.engine.Retrying(1)
		require.Equal(t, 1, n)
		require.Equal(t, int64(1), list[0].Row.ID)
		require.EqualError(t, list[0].Err, "attempt 1")

		for id := int64(1); id <= 3; id++ {
			msg := <-b.out
			require.Equal(t, []int64{id}, ids(msg))
			require.Empty(t, b.inFlight())
			msg.Ack()
		}
		synctest.Wait()
		_, n = b.engine.Retrying(1)
		require.Zero(t, n)
		state, _, _ = b.tracker.State()
		require.Empty(t, state.Holes)
		require.Equal(t, int64(7), state.Position.Floor)
	})
}

// Keys take turns: one with many messages does not keep others waiting.
func TestKeysTakeTurns(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t, ordered(delivery.ByKey, 1))
		b.pages <- keyed(1, "k", "k", "k", "l", "m")
		var order []int64
		for range 5 {
			msg := <-b.out
			order = append(order, ids(msg)...)
			msg.Ack()
		}
		require.Equal(t, []int64{1, 4, 5, 2, 3}, order)
	})
}

func TestUnorderedBoundsWhatIsInFlight(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		slots := make(chan struct{}, 3)
		b := start(t, ordered(delivery.Unordered, 4), func(e *delivery.Engine) { e.Slots = slots })
		b.pages <- keyed(1, "k", "k", "k", "k", "k", "k")
		first := b.inFlight()
		require.Len(t, first, 3, "the slots are shared with other shards")
		first[1].Nack()
		require.Len(t, b.inFlight(), 1, "a message that waits is not in flight")
	})
}

// What is taken in is bounded in number and bytes, in flight or waiting for its
// key.
func TestPendingIsBounded(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t, ordered(delivery.ByKey, 10), func(e *delivery.Engine) { e.Pending, e.PendingBytes = 3, 100 })
		b.pages <- keyed(1, "k", "k", "k", "k", "l")
		first := b.inFlight()
		require.Equal(t, []int64{1}, ids(first...), "the last row is not taken in: three of its key are")
		first[0].Ack()
		second := b.inFlight()
		require.Equal(t, []int64{2}, ids(second...))
		second[0].Ack()
		require.Equal(t, []int64{3, 5}, ids(b.inFlight()...))

		b = start(t, ordered(delivery.Unordered, 10), func(e *delivery.Engine) { e.PendingBytes = 100 })
		page := rows(1, 2, 3)
		for i := range page.Rows {
			page.Rows[i].Payload = make([]byte, 60)
		}
		b.pages <- page
		require.Equal(t, []int64{1, 2}, ids(b.inFlight()...), "one row may pass the bound")
	})
}

// A message dies after its attempts, with Watermill's poison keys and the reason,
// and what waited for it goes on (F07).
func TestExhaustedMessagesDie(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t, ordered(delivery.ByKey, 10), attempts(3))
		page := keyed(1, "k", "k")
		page.Rows[0].Attempt = 1 // in an earlier life of the message
		page.Rows[0].Metadata = []byte(`{"a":"b"}`)
		b.pages <- page
		(<-b.out).Nack()
		b.store.mu.Lock()
		b.store.failures = 2 // F60: it stays until its dead letter is stored
		b.store.mu.Unlock()
		(<-b.out).Nack()
		synctest.Wait()
		require.Empty(t, b.store.settled())
		msg := <-b.out
		require.Equal(t, []int64{2}, ids(msg))
		msg.Ack()
		synctest.Wait()
		verdicts := b.store.settled()
		require.Len(t, verdicts, 1)
		require.True(t, verdicts[0].Dead)
		require.Equal(t, 3, verdicts[0].Attempts)
		require.Equal(t, "attempt 3", verdicts[0].Error)
		require.JSONEq(t, `{"a":"b","reason_poisoned":"attempt 3","topic_poisoned":"","handler_poisoned":"","subscriber_poisoned":""}`,
			string(verdicts[0].Metadata))
		require.Len(t, b.store.died, 1)
		state, _, _ := b.tracker.State()
		require.Empty(t, state.Holes)
	})
}

func TestDeferredMessagesLetOthersPass(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t, func(e *delivery.Engine) { e.Deferred = true })
		b.pages <- rows(1, 2)
		(<-b.out).Nack()
		require.Equal(t, []int64{2}, ids(<-b.out))
		verdicts := b.store.settled()
		require.Len(t, verdicts, 1)
		require.False(t, verdicts[0].Dead)
		require.Equal(t, 1, verdicts[0].Attempts)
		require.Zero(t, verdicts[0].Due)
		require.Nil(t, verdicts[0].Metadata)
		require.GreaterOrEqual(t, verdicts[0].After, 800*time.Millisecond)
	})
}

// Watermill's DelayOnError middleware changes the metadata and lets the error
// through: the message is put off until then, wherever failures wait.
func TestChangedDelayPutsAMessageOff(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		page := rows(1, 2, 3)
		page.Rows[1].Metadata = []byte(`{"_watermill_delayed_until":"2001-01-01T00:00:00Z","a":"b"}`)
		b.pages <- page
		msg := <-b.out
		msg.Metadata.Set("_watermill_delayed_until", "not a time")
		msg.Nack()
		msg = <-b.out
		require.Equal(t, []int64{1}, ids(msg), "that is no delay")
		msg.Ack()
		msg = <-b.out
		require.Equal(t, []int64{2}, ids(msg))
		msg.Nack()
		msg = <-b.out
		require.Equal(t, []int64{2}, ids(msg), "the delay is an old one")
		msg.Metadata.Set("_watermill_delayed_until", "2100-01-01T00:00:00Z")
		msg.Metadata.Set("_watermill_delayed_for", "10s")
		msg.Metadata.Set("b", "of the handler")
		msg.Nack()
		require.Equal(t, []int64{3}, ids(<-b.out))
		verdicts := b.store.settled()
		require.Len(t, verdicts, 1)
		require.Equal(t, 2100, verdicts[0].Due.Year())
		require.JSONEq(t, `{"_watermill_delayed_until":"2100-01-01T00:00:00Z","_watermill_delayed_for":"10s","a":"b"}`, string(verdicts[0].Metadata))
	})
}

func TestAckDeadline(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t, attempts(2), func(e *delivery.Engine) { e.AckDeadline = 5 * time.Second })
		b.pages <- rows(1)
		msg := <-b.out
		time.Sleep(4 * time.Second)
		require.NoError(t, msg.Context().Err())
		time.Sleep(time.Second)
		synctest.Wait()
		require.ErrorIs(t, context.Cause(msg.Context()), delivery.ErrAckDeadline)
		require.Empty(t, b.inFlight(), "it has its grace to end")
		msg.Nack()
		msg = <-b.out
		time.Sleep(6 * time.Second)
		msg.Ack()
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Equal(t, int64(1), state.Position.Floor, "an ack in the grace period counts")

		// One that never ends dies of it (F61).
		b.pages <- rows(2)
		<-b.out
		<-b.out
		began := time.Now()
		for len(b.store.settled()) == 0 {
			time.Sleep(time.Second)
		}
		require.Equal(t, 65*time.Second, time.Since(began).Truncate(5*time.Second))
		require.True(t, b.store.settled()[0].Dead)
	})
}

// What a shutdown or a lost lease fails did not fail.
func TestTheEndCountsForNothing(t *testing.T) {
	t.Parallel()

	for name, end := range map[string]func(*bench){
		"stop":       func(b *bench) { b.stop() },
		"lost lease": func(b *bench) { b.lose(errors.New("lost")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				b := start(t, attempts(1))
				b.pages <- rows(1)
				msg := <-b.out
				end(b)
				synctest.Wait()
				msg.Nack()
				<-b.done
				require.Empty(t, b.store.settled())
				state, _, _ := b.tracker.State()
				require.Empty(t, state.Holes)
			})
		})
	}
}

// What somebody buries while it fails is not delivered again.
func TestBuriedMessagesGoNoFurther(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1, 2)
		(<-b.out).Nack()
		b.store.mu.Lock()
		b.store.buried[1] = true
		b.store.mu.Unlock()
		require.Equal(t, []int64{2}, ids(<-b.out))
	})
}

// A handler that is past its deadline goes on with its message, so nobody else
// may look at what it changes: a map that is read and written at once ends the
// process.
func TestOverdueHandlersKeepTheirMessage(t *testing.T) {
	t.Parallel()

	for name, change := range map[string]func(*delivery.Engine){
		"again": attempts(5),
		"dead":  attempts(1),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				b := start(t, change, func(e *delivery.Engine) { e.AckDeadline = 5 * time.Second })
				b.pages <- rows(1)
				msg := <-b.out
				go func() {
					time.Sleep(65 * time.Second) // the deadline and the grace
					msg.Metadata.Set("still", "at it")
					msg.SetContext(context.Background())
				}()
				time.Sleep(70 * time.Second)
				synctest.Wait()
			})
		})
	}
}

// What a handler does to the bytes of a message must not be in its next delivery.
func TestRedeliveredPayloadsAreWhole(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		page := rows(1)
		page.Rows[0].Payload = []byte("payload")
		b.pages <- page
		msg := <-b.out
		clear(msg.Payload)
		msg.Nack()
		require.Equal(t, "payload", string((<-b.out).Payload))
	})
}

// Errors quote what they are about, which may be any bytes. Metadata must be
// text all the same, or the dead letter could not be stored, ever.
func TestReasonsAreText(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t, attempts(1), func(e *delivery.Engine) {
			e.Reason = func(context.Context) error { return errors.New("bad bytes \xff and \x00") }
		})
		b.pages <- rows(1)
		(<-b.out).Nack()
		synctest.Wait()
		verdicts := b.store.settled()
		require.Len(t, verdicts, 1)
		require.JSONEq(t, `{"reason_poisoned":"bad bytes \ufffd and \ufffd","topic_poisoned":"","handler_poisoned":"","subscriber_poisoned":""}`,
			string(verdicts[0].Metadata))
		require.True(t, utf8.Valid(verdicts[0].Metadata))
	})

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1)
		msg := <-b.out
		msg.Metadata.Set("_watermill_delayed_until", "2100-01-01T00:00:00Z")
		msg.Metadata.Set("_watermill_delayed_for", "\xff")
		msg.Nack()
		synctest.Wait()
		verdicts := b.store.settled()
		require.Len(t, verdicts, 1)
		require.True(t, utf8.Valid(verdicts[0].Metadata))
	})
}

// Messages that wait for a long time for their next delivery are let go with the
// lease. The runtime keeps some of the timers that were stopped.
func TestWaitingMessagesEndWithTheRun(t *testing.T) {
	t.Parallel()

	const n = 100
	b := start(t, ordered(delivery.Unordered, n), func(e *delivery.Engine) {
		e.Backoff = backoff.Policy{Min: time.Hour, Max: time.Hour}
		e.Pending = n
	})
	var held []weak.Pointer[[1024]byte]
	for id := range int64(n) {
		payload := new([1024]byte)
		held = append(held, weak.Make(payload))
		page := rows(id)
		page.Rows[0].Payload = payload[:]
		b.pages <- page
		(<-b.out).Nack()
	}
	require.Eventually(t, func() bool {
		_, waiting := b.engine.Retrying(0)
		return waiting == n
	}, time.Minute, time.Millisecond)
	b.stop()
	<-b.done
	require.Eventually(t, func() bool {
		runtime.GC()
		kept := 0
		for _, payload := range held {
			if payload.Value() != nil {
				kept++
			}
		}
		return kept < n/2
	}, time.Minute, 10*time.Millisecond, "timers keep them")
}

// Nor does what fails while the run ends begin to wait.
func TestNothingBeginsToWaitAfterTheEnd(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t, func(e *delivery.Engine) {
			e.Backoff = backoff.Policy{Min: time.Hour, Max: time.Hour}
			e.Reason = func(context.Context) error {
				// The end comes right after the message was seen to fail.
				<-e.Stop.Done()
				time.Sleep(time.Second) // virtual: when all others wait
				return errors.New("failed")
			}
		})
		payload := new([1024]byte)
		held := weak.Make(payload)
		page := rows(1)
		page.Rows[0].Payload = payload[:]
		b.pages <- page
		(<-b.out).Nack()
		synctest.Wait()
		b.stop()
		<-b.done
		payload, page = nil, window.Page{}
		synctest.Wait()
		runtime.GC()
		runtime.GC()
		require.True(t, held.Value() == nil, "a timer keeps it")
	})
}
