package forwarder

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// fate is what the model says of a message.
type fate int

const (
	healthy fate = iota
	// refused for good, with an error that says so.
	refused
	// odd fails always, with an error that says nothing.
	odd
	// passing fails some times and then no more.
	passing
)

// schedule is a random run: lines, messages that fail, and a destination that comes
// and goes.
type schedule struct {
	random *rand.Rand
	source *fakeOutbox
	fates  map[string]fate
	// left is how often a passing message still fails.
	left map[string]int
	// outages are when the destination is down, each with its error.
	outages []outage
}

type outage struct {
	from, to time.Duration
	err      error
}

func newSchedule(seed uint64) *schedule {
	random := rand.New(rand.NewPCG(seed, 1))
	s := &schedule{random: random, source: storing(), fates: map[string]fate{}, left: map[string]int{}}
	s.source.pause = time.Duration(1+random.IntN(2000)) * time.Millisecond
	lines := 1 + random.IntN(6)
	for i := range 20 + random.IntN(100) {
		key := ""
		if random.IntN(5) > 0 {
			key = fmt.Sprint("line", random.IntN(lines), "-")
		}
		r := row{number: int64(i + 1), topic: "t", key: key, uuid: fmt.Sprint(key, i+1)}
		s.source.rows = append(s.source.rows, r)
		switch random.IntN(30) {
		case 0:
			s.fates[r.uuid] = refused
		case 1:
			s.fates[r.uuid] = odd
		case 2:
			s.fates[r.uuid], s.left[r.uuid] = passing, 1+random.IntN(3)
		}
	}
	for at := time.Duration(random.IntN(50)) * time.Millisecond; len(s.outages) < random.IntN(4); {
		o := outage{from: at, to: at + time.Duration(random.IntN(60_000))*time.Millisecond, err: errDown}
		if random.IntN(2) == 0 {
			o.err = errOdd
		}
		s.outages = append(s.outages, o)
		at = o.to + time.Duration(random.IntN(2000))*time.Millisecond
	}
	return s
}

// down returns why the destination does not take anything, nil if it does.
func (s *schedule) down(at time.Duration) error {
	for _, o := range s.outages {
		if at >= o.from && at < o.to {
			return o.err
		}
	}
	return nil
}

// unknown reports whether an outage has errors that say nothing.
func (s *schedule) unknown() bool {
	return slices.ContainsFunc(s.outages, func(o outage) bool { return errors.Is(o.err, errOdd) })
}

// endedBefore reports whether an outage that nobody can tell from the fault of a message
// ended in the second before the broker took the next of the message's line.
func (s *schedule) endedBefore(b *broker, rows []row, r row) bool {
	i := slices.IndexFunc(rows, func(next row) bool {
		return next.number > r.number && next.line() == r.line() && slices.Contains(b.uuids(), next.uuid)
	})
	if i < 0 {
		return false
	}
	took := b.took()
	at := took[slices.IndexFunc(took, func(p published) bool { return p.uuid == rows[i].uuid })].at
	return slices.ContainsFunc(s.outages, func(o outage) bool {
		return errors.Is(o.err, errOdd) && o.to <= at && at-o.to < proofTime
	})
}

// Whatever fails and when: nothing is lost or comes twice, lines keep their order,
// what cannot pass is a dead letter and nothing else is, and a healthy message spends
// no attempt but one that the destination's coming and going explains.
func TestRandomSchedules(t *testing.T) {
	t.Parallel()

	for seed := range uint64(300) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newSchedule(seed)
				var mu sync.Mutex
				b := newBroker(nil)
				b.takes = time.Duration(s.random.IntN(20)) * time.Millisecond
				b.verdict = func(_ string, msg *message.Message) error {
					mu.Lock()
					defer mu.Unlock()
					if err := s.down(time.Since(b.start)); err != nil {
						return err
					}
					switch s.fates[msg.UUID] {
					case refused:
						return outbox.Permanent(errOdd)
					case odd:
						return errOdd
					case passing:
						if s.left[msg.UUID]--; s.left[msg.UUID] >= 0 {
							return errOdd
						}
					case healthy:
					}
					return nil
				}
				var publisher message.Publisher = b
				if s.random.IntN(2) == 0 {
					publisher = &batchBroker{broker: b}
				}
				// Enough that no coming and going uses them up, and a passing message none.
				const attempts = 8
				f := run(t, Config{Source: s.source, MaxAttempts: attempts, BatchSize: 1 + s.random.IntN(8), Destinations: []Destination{{
					Publisher: publisher, MaxInFlight: 1 + s.random.IntN(8), Failures: 1 + s.random.IntN(6),
				}}})
				// Now and then something new is published, or a lone message that fails would
				// wait, as it should, for ever.
				stop := make(chan struct{})
				go func() {
					for i := int64(1000); ; i++ {
						select {
						case <-stop:
							return
						case <-time.After(30 * time.Second):
							if s.settled() {
								return
							}
							s.source.add(row{number: i, topic: "t", uuid: fmt.Sprint("free", i)})
						}
					}
				}()
				f.wait()
				close(stop)

				s.source.mu.Lock()
				rows := s.source.rows
				s.source.mu.Unlock()
				want, dead := map[string][]string{}, []int64{}
				died := s.source.deadIDs("default")
				for _, r := range rows {
					fate := s.fates[r.uuid]
					// One that fails now and then may do so when an outage that nobody can tell
					// from it has just ended, and what is behind it is accepted: it is condemned.
					// So is a healthy one, if the outage ends right between the two.
					condemned := fate == passing && s.unknown() && slices.Contains(died, r.number) ||
						fate == healthy && slices.Contains(died, r.number) && s.endedBefore(b, rows, r)
					if fate == refused || fate == odd || condemned {
						dead = append(dead, r.number)
						continue
					}
					want[r.line()] = append(want[r.line()], r.uuid)
					if fate == healthy {
						require.LessOrEqual(t, s.source.failedAttempts("default", r.number), len(s.outages), r.uuid)
					}
				}
				require.Equal(t, dead, died)
				got := map[string][]string{}
				for _, p := range b.took() {
					i := slices.IndexFunc(rows, func(r row) bool { return r.uuid == p.uuid })
					got[rows[i].line()] = append(got[rows[i].line()], p.uuid)
				}
				require.Equal(t, want, got)
				require.Zero(t, f.Status().Destinations[0].FailingCount)
				require.Zero(t, b.ended)
			})
		})
	}
}

// settled reports whether the original rows are.
func (s *schedule) settled() bool {
	f := s.source.feed("default")
	f.mu.Lock()
	defer f.mu.Unlock()
	s.source.mu.Lock()
	defer s.source.mu.Unlock()
	for _, r := range s.source.rows {
		if r.number < 1000 && !f.acked[r.number] && f.dead[r.number] == nil {
			return false
		}
	}
	return true
}
