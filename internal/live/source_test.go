package live

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/replication"
)

// The transaction that a slot would have waited for is remembered by its id.
// After a failover, where ids may begin lower, no slot was made until the new
// server had come to that id: what was remembered ends with its life.
func TestHolderOfAnotherLifeIsForgotten(t *testing.T) {
	t.Parallel()

	life, other := window.Life{Era: 7, Boot: "boot"}, window.Life{Era: 7, Boot: "another"}
	r := newRig(t, testBytes)
	r.server.set(func(s *fakeServer) { s.xmin, s.xmax, s.who = 1000, 1010, "somebody" })
	locked := errors.New("lock timeout")
	err := r.source.awaitHolder(t.Context(), life, locked)
	require.ErrorIs(t, err, errHolder)
	require.ErrorContains(t, err, "somebody holds transaction 1000")

	require.ErrorIs(t, r.source.checkHolder(t.Context(), life), errHolder)
	r.server.set(func(s *fakeServer) { s.xmin = 900 })
	require.ErrorIs(t, r.source.checkHolder(t.Context(), life), errHolder, "or an earlier one")
	require.NoError(t, r.source.checkHolder(t.Context(), other))
	require.NoError(t, r.source.checkHolder(t.Context(), life), "it is forgotten for good")

	require.ErrorIs(t, r.source.awaitHolder(t.Context(), life, locked), errHolder)
	r.server.set(func(s *fakeServer) { s.xmin = 1001 })
	require.NoError(t, r.source.checkHolder(t.Context(), life), "it has ended")
	require.Equal(t, holder{}, r.source.holder)
}

// When the transaction has ended before it could be asked for, there is none to
// wait for: another attempt may work.
func TestHolderThatHasEnded(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes)
	locked := errors.New("lock timeout")
	err := r.source.awaitHolder(t.Context(), window.Life{Era: 7, Boot: "boot"}, locked)
	require.ErrorIs(t, err, locked)
	require.NotErrorIs(t, err, errHolder)
	require.NoError(t, r.source.checkHolder(t.Context(), window.Life{Era: 7, Boot: "boot"}))
}

// A slot is not even tried for while a transaction is known to be old.
func TestOldTransactionIsAHolder(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes)
	life := window.Life{Era: 7, Boot: "boot"}
	r.server.set(func(s *fakeServer) { s.xmin, s.age, s.who = 550, oldTransaction.Seconds()+0.1, "process 12 (psql)" })
	err := r.source.checkHolder(t.Context(), life)
	require.ErrorIs(t, err, errHolder)
	require.ErrorContains(t, err, "process 12 (psql) holds transaction 550")
	r.server.set(func(s *fakeServer) { s.age = oldTransaction.Seconds() })
	require.NoError(t, r.source.checkHolder(t.Context(), life))
}

// On a server that writes much, the slot keeps more than the bound between two
// of the moments at which it moves. That was taken for a transaction's doing, or
// for a server that is behind, and the stream was closed every few seconds.
func TestPinnedWAL(t *testing.T) {
	t.Parallel()

	const bound = 1000 // the rig's
	type look struct {
		after      time.Duration
		pinned     int64
		xmin, xmax int64
		want       []error
	}
	long := []error{errHolder, errPinned}
	for name, looks := range map[string][]look{
		"nothing runs": {
			{0, bound, 600, 600, nil},
			{time.Minute, bound + 1, 600, 600, nil},
			{time.Minute, pinnedFactor * bound, 600, 600, nil},
			{0, pinnedFactor*bound + 1, 600, 600, []error{errPinned}},
		},
		"short transactions run": {
			{0, bound + 1, 600, 700, nil},
			{oldTransaction - 1, pinnedFactor * bound, 600, 700, nil},
			{oldTransaction - 1, pinnedFactor * bound, 601, 700, nil},
			{oldTransaction - 1, pinnedFactor * bound, 601, 700, nil},
			{oldTransaction, pinnedFactor * bound, 602, 700, nil},
		},
		"a long one runs": {
			{0, bound + 1, 600, 700, nil}, {oldTransaction, bound, 600, 700, nil}, {0, bound + 1, 600, 700, long},
		},
		"a long one and much": {
			{0, 0, 600, 700, nil}, {oldTransaction, pinnedFactor*bound + 1, 600, 700, long},
		},
		"too much in a short time": {{0, pinnedFactor*bound + 1, 600, 700, []error{errPinned}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, testBytes, "topic")
				for _, l := range looks {
					time.Sleep(l.after)
					r.server.set(func(s *fakeServer) { s.pinned, s.xmin, s.xmax = l.pinned, l.xmin, l.xmax })
					err := r.source.checkPinned(t.Context(), r.session)
					if l.want == nil {
						require.NoError(t, err, "%+v", l)
						continue
					}
					for _, want := range l.want {
						require.ErrorIs(t, err, want)
					}
					require.Equal(t, errors.Is(err, errHolder), r.source.holder == holder{xid: uint64(l.xmin), life: r.session.base.life},
						"the next stream waits for the end of a long one")
				}
			})
		})
	}
}

// Below four times the bound the stream goes on, whatever is looked at how often.
func TestStreamOutlivesWALThatNobodyPins(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, testBytes, "topic")
		r.server.set(func(s *fakeServer) { s.pinned = pinnedFactor * r.source.config.MaxPinned })
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		require.ErrorIs(t, r.session.run(ctx), context.DeadlineExceeded)
		require.Greater(t, r.server.count(kindPinned), 200)
		require.Equal(t, holder{}, r.source.holder)
	})
}

// An id that is drawn through the pool waits for whoever has its connections,
// while the dispatcher waits for the id.
func TestIDsAreDrawnBesideThePool(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes)
	r.pool.before = func(context.Context, string) error { return errors.New("busy") }
	n, err := r.source.drawXID(t.Context())
	require.NoError(t, err)
	require.Equal(t, uint64(501), n)
}

// What keeps the stream from opening is told as the status, and looked at again:
// soon, if it passes by itself, and later, if it takes a person. Only what is no
// reason of the server's own is a failure.
func TestSourceWaitsForItsReason(t *testing.T) {
	t.Parallel()

	refused := errors.New("connection refused")
	for name, test := range map[string]struct {
		change         func(r *rig)
		says           string
		least, longest time.Duration // between two attempts
		failure        bool
	}{
		"a setting": {
			change: func(r *rig) {
				r.source.config.Problems = func(context.Context) ([]string, error) { return []string{"wal_level", "slots"}, nil }
			},
			says:  "the WAL cannot be read: wal_level; slots",
			least: recheckInterval, longest: recheckInterval,
		},
		"a long transaction": {
			change: func(r *rig) { r.server.age, r.server.who = 60, "somebody" },
			says:   "somebody holds transaction 600",
			least:  holderInterval, longest: holderInterval,
		},
		"no connection": {
			change: func(r *rig) {
				r.source.config.Connect = func(context.Context, replication.ConnectOptions) (*replication.Conn, error) {
					return nil, refused
				}
			},
			says:  "connection refused",
			least: 100 * time.Millisecond, longest: 10 * time.Second, failure: true,
		},
		"no barrier": {
			change: func(r *rig) { r.barrier.before = func(context.Context, string) error { return refused } },
			says:   "connection refused",
			least:  100 * time.Millisecond, longest: 10 * time.Second, failure: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, testBytes)
				r.source.session = nil
				test.change(r)
				var mu sync.Mutex
				var attempts []time.Time
				failures := 0
				answer := r.barrier.before
				r.barrier.before = func(ctx context.Context, kind string) error {
					mu.Lock()
					attempts = append(attempts, time.Now())
					mu.Unlock()
					if answer == nil {
						return nil
					}
					return answer(ctx, kind)
				}
				r.source.config.Failed = func(error) {
					mu.Lock()
					defer mu.Unlock()
					failures++
				}
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { r.source.Run(ctx) })
				time.Sleep(time.Hour)
				require.Equal(t, Idle, r.source.Status().State, "nobody wants it")

				interest := r.source.Want(window.One("topic"))
				time.Sleep(10 * time.Minute)
				status := r.source.Status()
				require.Equal(t, Waiting, status.State)
				require.Contains(t, status.Reason, test.says)
				require.Empty(t, status.Slot)
				require.Nil(t, interest.Attach("group", Shard{}))
				interest.Close()
				time.Sleep(time.Minute)
				require.Equal(t, Idle, r.source.Status().State)
				cancel()
				running.Wait()

				require.Greater(t, len(attempts), 10)
				for i := range attempts[1:] {
					pause := attempts[i+1].Sub(attempts[i])
					require.GreaterOrEqual(t, pause, test.least)
					require.LessOrEqual(t, pause, test.longest)
				}
				require.LessOrEqual(t, attempts[len(attempts)-1].Sub(attempts[0]), 10*time.Minute, "it goes on although nobody wants it")
				if test.failure {
					require.Equal(t, len(attempts), failures)
				} else {
					require.Zero(t, failures)
				}
			})
		})
	}
}

// A change of the state wakes readers where they could attach, or no longer, and
// counts from when it began.
func TestStatus(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, testBytes, "topic")
		since := time.Now()
		changed := r.source.Changed()
		r.source.set(Waiting, "reason", false)
		time.Sleep(time.Minute)
		r.source.set(Waiting, "reason", false)
		status := r.source.Status()
		require.Equal(t, Status{State: Waiting, Reason: "reason", Since: since, Slot: "slot"}, status)
		select {
		case <-changed:
			require.FailNow(t, "woken for nothing")
		default:
		}
		r.source.set(Open, "", true)
		<-changed
		require.Equal(t, since.Add(time.Minute), r.source.Status().Since)

		r.attach("topic", "a")
		r.attach("topic", "b")
		r.receive(&replication.Keepalive{WALEnd: 77})
		r.visible("1000:1000:")
		r.transaction(1001, stored{id: 1, topic: "topic", payload: 100})
		status = r.source.Status()
		require.Equal(t, 2, status.Attached)
		require.Equal(t, replication.LSN(77), status.Received)
		require.Greater(t, status.Buffered, 100)
	})
}
