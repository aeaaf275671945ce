package forwarder

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

// batchBroker takes batches; each message is judged by itself.
type batchBroker struct {
	*broker

	// perCall is how long a call takes.
	perCall time.Duration

	mu    sync.Mutex
	sizes []int
	bytes int
	// result replaces the results, unless nil.
	result func(batch []Outgoing) []error
}

func (b *batchBroker) Publish(string, ...*message.Message) error {
	panic("a BatchPublisher is used as one")
}

func (b *batchBroker) PublishBatch(batch []Outgoing) []error {
	b.mu.Lock()
	b.sizes = append(b.sizes, len(batch))
	size := 0
	for _, out := range batch {
		size += len(out.Message.Payload)
	}
	b.bytes = max(b.bytes, size)
	result := b.result
	b.mu.Unlock()
	if result != nil {
		return result(batch)
	}
	errs := make([]error, len(batch))
	failed := false
	time.Sleep(b.perCall)
	for i, out := range batch {
		errs[i] = b.publish(out.Topic, out.Message)
		failed = failed || errs[i] != nil
	}
	if !failed {
		return nil
	}
	return errs
}

func (b *batchBroker) callsSoFar() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.sizes)
}

func newBatchBroker(verdict func(string, *message.Message) error) *batchBroker {
	b := &batchBroker{broker: newBroker(verdict)}
	b.takes, b.perCall = 0, time.Millisecond
	return b
}

// What comes while a call runs leaves together, across lines; lines keep their
// order, and the one that fails is alone with it.
func TestBatches(t *testing.T) {
	bubble(t, func(t *testing.T) {
		keys := make([]string, 400)
		for i := range keys {
			keys[i] = fmt.Sprint("k", i%40, "-")
		}
		source := storing(rowsOf(keys...)...)
		bad := source.rows[3].uuid
		b := newBatchBroker(func(_ string, msg *message.Message) error {
			if msg.UUID == bad {
				return errOdd
			}
			return nil
		})
		run(t, Config{Source: source, MaxAttempts: 2, Destinations: []Destination{{Publisher: b, MaxInFlight: 40}}}).wait()
		require.Len(t, b.took(), 399)
		require.Equal(t, []int64{4}, source.deadIDs("default"))
		largest := 0
		for _, n := range b.sizes {
			largest = max(largest, n)
		}
		require.Greater(t, largest, 1, "nothing left together")
		require.LessOrEqual(t, largest, 40, "a batch has one message of a line")
		last := map[string]int{}
		for _, p := range b.took() {
			var k, n int
			_, err := fmt.Sscanf(p.uuid, "k%d-%d", &k, &n)
			require.NoError(t, err)
			require.Greater(t, n, last[fmt.Sprint(k)])
			last[fmt.Sprint(k)] = n
			require.Equal(t, 1, b.tried(p.uuid), "those beside the one that failed are not repeated")
		}
	})
}

// A publisher that panics, or does not say what became of each message, has taken
// none as far as anybody knows.
func TestBatchResultsThatAreNone(t *testing.T) {
	for name, result := range map[string]func(batch []Outgoing) []error{
		"too few": func(batch []Outgoing) []error { return make([]error, len(batch)+1) },
		"a panic": func([]Outgoing) []error { panic("batch") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				source := storing(rowsOf("k", "l")...)
				b := newBatchBroker(nil)
				b.result = result
				f := run(t, Config{Source: source, Destinations: []Destination{{Publisher: b}}})
				time.Sleep(time.Minute)
				require.Empty(t, source.ackedIDs("default"))
				status := f.Status().Destinations[0]
				require.Equal(t, 2, status.FailingCount)
				if name == "too few" {
					require.ErrorIs(t, status.Failing[0].Err, errBatchResult)
				} else {
					var panicked *PanicError
					require.ErrorAs(t, status.Failing[0].Err, &panicked)
				}
				b.mu.Lock()
				b.result = nil
				b.mu.Unlock()
				f.wait()
				require.Len(t, b.took(), 2)
			})
		})
	}
}

// What waits for its turn while others are published is not begun when the end has
// come, or its lease is lost, and its deadline is that of its own call.
func TestWhatWaitsForABatch(t *testing.T) {
	begin := func(t *testing.T) (source *fakeOutbox, b *batchBroker, f *running) {
		t.Helper()
		source = storing()
		source.live = true
		b = newBatchBroker(nil)
		b.perCall = 20 * time.Second
		f = run(t, Config{Source: source, CloseTimeout: 30 * time.Second, Destinations: []Destination{{Publisher: b, PublishTimeout: 25 * time.Second}}})
		// Two calls run, with one message each, since they come one by one; the others
		// wait.
		for _, r := range rowsOf("a", "b", "c", "d", "e") {
			source.add(r)
			synctest.Wait()
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		require.Equal(t, []int{1, 1}, b.sizes)
		return source, b, f
	}
	t.Run("its deadline", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			source, b, f := begin(t)
			var late []time.Duration
			b.become(func(_ string, msg *message.Message) error {
				deadline, _ := msg.Context().Deadline()
				b.broker.mu.Lock()
				defer b.broker.mu.Unlock()
				late = append(late, time.Until(deadline))
				return msg.Context().Err()
			})
			time.Sleep(10 * time.Minute)
			require.Len(t, source.ackedIDs("default"), 5)
			for i := range late {
				require.GreaterOrEqual(t, late[i], time.Duration(0))
			}
			f.end()
		})
	})
	t.Run("the end", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			_, b, f := begin(t)
			time.Sleep(time.Second)
			f.end()
			b.mu.Lock()
			defer b.mu.Unlock()
			require.Equal(t, []int{1, 1}, b.sizes)
		})
	})
	t.Run("the lease", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			source, b, f := begin(t)
			time.Sleep(time.Second)
			source.feed("default").lose(errors.New("taken over"))
			f.wait()
			b.mu.Lock()
			defer b.mu.Unlock()
			require.Equal(t, []int{1, 1}, b.sizes)
		})
	})
}

// combining returns what publishes messages of a size each with one combiner, and waits
// until nothing more happens at this moment.
func combining(t *testing.T, publisher BatchPublisher) (publish func(n, size int), publishing *sync.WaitGroup) {
	t.Helper()
	c := &combiner{
		publisher: publisher, patience: time.Minute,
		mayBegin: func(*consumed) error { return nil }, deadline: func() time.Time { return time.Now().Add(time.Hour) },
	}
	publishing = &sync.WaitGroup{}
	return func(n, size int) {
		for range n {
			msg := message.NewMessage("u", make([]byte, size))
			publishing.Go(func() {
				if err := c.publish(&consumed{Message: msg, ctx: t.Context()}, outgoing{topic: "t", msg: msg}); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
	}, publishing
}

// What comes while a call runs waits until it is as much as what is in calls, or a
// millisecond has passed, or no call runs: or each message that comes back would
// leave alone.
func TestMessagesWaitForOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := newBatchBroker(nil)
		type call struct {
			n      int
			answer chan struct{}
		}
		calls := make(chan call, 10)
		b.result = func(batch []Outgoing) []error {
			c := call{len(batch), make(chan struct{})}
			calls <- c
			<-c.answer
			return nil
		}
		publish, publishing := combining(t, b)
		begun := func(n int) call {
			t.Helper()
			require.NotEmpty(t, calls)
			c := <-calls
			require.Equal(t, n, c.n)
			return c
		}
		answer := func(c call) {
			close(c.answer)
			synctest.Wait()
		}

		publish(1, 1)
		first := begun(1) // no call runs
		publish(1, 1)
		second := begun(1) // as many as in calls
		publish(5, 1)
		require.Empty(t, calls, "two calls run")
		answer(first)
		five := begun(5)
		answer(second)

		publish(4, 1)
		require.Empty(t, calls, "five are in a call")
		start := time.Now()
		four := <-calls
		require.Equal(t, 4, four.n)
		require.Equal(t, linger, time.Since(start))
		answer(four)

		start = time.Now()
		publish(4, 1)
		require.Empty(t, calls, "that others have waited says nothing about these")
		publish(1, 1)
		others := begun(5)
		publish(1, 1)
		answer(five)
		require.Empty(t, calls, "five are in a call")
		answer(others)
		answer(begun(1)) // no call runs
		require.Zero(t, time.Since(start))

		publish(1, 1)
		first = begun(1)
		publish(5, 1)
		second = begun(1)
		answer(first)
		four = begun(4)
		publish(5, 1)
		answer(second)
		five = begun(5) // in calls, 9
		time.Sleep(linger / 2)
		publish(1, 1)
		answer(four)
		require.Empty(t, calls, "it begins to wait")
		time.Sleep(linger / 2)
		publish(4, 1)
		second = begun(5) // as many as in the call; the wait is over
		answer(five)
		time.Sleep(linger / 4)
		publish(1, 1)
		start = time.Now()
		last := <-calls
		require.Equal(t, linger, time.Since(start), "a wait of its own")
		answer(last)
		answer(second)
		publishing.Wait()
	})
}

// What does not fit into a call goes into another one, at once if it may.
func TestWhatABatchLeavesOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := newBatchBroker(nil)
		var begun []time.Duration
		start := time.Now()
		b.result = func([]Outgoing) []error {
			b.mu.Lock()
			begun = append(begun, time.Since(start))
			b.mu.Unlock()
			time.Sleep(20 * time.Second)
			return nil
		}
		publish, publishing := combining(t, b)
		publish(1, 1)
		publish(1, 1)
		publish(5, 1)
		time.Sleep(40*time.Second - linger/2) // the five are in a call that is about to end
		publish(3, maxBatchBytes/2)
		publishing.Wait()
		require.Equal(t, []int{1, 1, 5, 2, 1}, b.sizes)
		require.LessOrEqual(t, begun[4]-begun[3], linger)
	})
}

// A call is bounded in number and bytes; one large message goes all the same.
func TestBatchesAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := newBatchBroker(nil)
		b.perCall = time.Second
		publish, publishing := combining(t, b)
		// While these are on their way, the others gather.
		publish(1, 1)
		publish(1, 1)
		publish(2*maxBatch+1, 1)
		publish(5, maxBatchBytes/2)
		publish(1, 2*maxBatchBytes)
		publishing.Wait()
		require.Equal(t, []int{maxBatch, maxBatch, 2, 2, 2, 1, 1, 1}, sorted(b.sizes), "1 and the first of the large ones go together")
		require.Equal(t, 2*maxBatchBytes, b.bytes)
	})
}

// What is in a batch is not what the source has: its Ack reaches nobody. It is the
// same when it comes again.
func TestTheMessagesOfABatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		source := storing(rowsOf("k", "l")...)
		for i := range source.rows {
			source.rows[i].metadata = message.Metadata{"a": "b"}
		}
		b := newBatchBroker(nil)
		tries := map[string]int{}
		b.result = func(batch []Outgoing) []error {
			b.mu.Lock()
			defer b.mu.Unlock()
			errs := make([]error, len(batch))
			for i, out := range batch {
				if tries[out.Message.UUID]++; tries[out.Message.UUID] < 3 {
					errs[i] = errDown
				}
				out.Message.Ack()
				require.Equal(t, message.Metadata{"a": "b", "id": fmt.Sprint("7-", out.Message.UUID[1:])}, out.Message.Metadata)
				require.Equal(t, "payload of "+out.Message.UUID, string(out.Message.Payload))
				require.NotNil(t, out.Message.Context().Value(fakeRowKey{}))
				deadline, ok := out.Message.Context().Deadline()
				require.True(t, ok)
				require.Equal(t, DefaultPublishTimeout, time.Until(deadline))
			}
			return errs
		}
		f := run(t, Config{Source: source, Destinations: []Destination{{Publisher: b, DeduplicationKey: "id"}}})
		synctest.Wait()
		require.Empty(t, source.ackedIDs("default"))
		f.wait()
		require.Equal(t, map[string]int{"k1": 3, "l2": 3}, tries)
		require.Equal(t, []int64{1, 2}, source.ackedIDs("default"))
	})
}
