package forwarder

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

// errDown is how a broker that is down fails, errOdd says nothing of whose fault it
// is.
var (
	errDown error = &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	errOdd        = errors.New("no")
)

// broker is a destination that does as it is told. Safe for concurrent use.
type broker struct {
	// takes is how long a call takes.
	takes time.Duration

	mu sync.Mutex
	// verdict says what becomes of a message, nil that it is taken.
	verdict func(topic string, msg *message.Message) error
	got     []published
	// calls counts the messages that were tried, by UUID.
	calls         map[string]int
	running, peak int
	attempted     []time.Duration
	// ended counts those whose context had ended already.
	ended, closed int
	start         time.Time
}

// published is a message that the broker took.
type published struct {
	topic, uuid, payload string
	metadata             message.Metadata
	at                   time.Duration
}

func newBroker(verdict func(topic string, msg *message.Message) error) *broker {
	return &broker{verdict: verdict, calls: map[string]int{}, start: time.Now(), takes: time.Millisecond}
}

// Publish does not heed the context: what had ended when it was called is counted.
func (b *broker) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if err := b.publish(topic, msg); err != nil {
			return err
		}
	}
	return nil
}

func (b *broker) publish(topic string, msg *message.Message) error {
	b.mu.Lock()
	b.running++
	b.peak = max(b.peak, b.running)
	b.calls[msg.UUID]++
	b.attempted = append(b.attempted, time.Since(b.start))
	if msg.Context().Err() != nil {
		b.ended++
	}
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.running--
	}()
	time.Sleep(b.takes)
	b.mu.Lock()
	verdict := b.verdict
	b.mu.Unlock()
	if verdict != nil {
		if err := verdict(topic, msg); err != nil {
			return err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.got = append(b.got, published{topic, msg.UUID, string(msg.Payload), msg.Metadata, time.Since(b.start)})
	return nil
}

func (b *broker) Close() error {
	b.closed++
	return nil
}

// become changes what becomes of messages.
func (b *broker) become(verdict func(topic string, msg *message.Message) error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.verdict = verdict
}

// tried returns how often a message was tried.
func (b *broker) tried(uuid string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.calls[uuid]
}

// tries returns how many calls there were.
func (b *broker) tries() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.attempted)
}

// uuids returns the UUIDs of the messages it took, in order.
func (b *broker) uuids() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := []string{}
	for _, p := range b.got {
		list = append(list, p.uuid)
	}
	return list
}

// took returns the messages it took, in order.
func (b *broker) took() []published {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.got)
}

// mostAtOnce returns how many calls ran at the same time.
func (b *broker) mostAtOnce() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.peak
}

// only is a verdict for one message, all others are taken.
func only(uuid string, err error) func(string, *message.Message) error {
	return func(_ string, msg *message.Message) error {
		if msg.UUID == uuid {
			return err
		}
		return nil
	}
}

func always(err error) func(string, *message.Message) error {
	return func(string, *message.Message) error { return err }
}

// rowsOf returns rows of topic "t" with UUIDs of their keys and numbers: k1, k2, l3.
func rowsOf(keys ...string) []row {
	rows := make([]row, len(keys))
	for i, key := range keys {
		uuid := fmt.Sprint(key, i+1)
		rows[i] = row{number: int64(i + 1), topic: "t", key: key, uuid: uuid, payload: "payload of " + uuid}
	}
	return rows
}

func storing(rows ...row) *fakeOutbox { return &fakeOutbox{rows: rows, pause: 100 * time.Millisecond} }

// running is a Forwarder that runs.
type running struct {
	*Forwarder

	t     *testing.T
	ended chan error
	stop  context.CancelFunc
}

// run begins a Forwarder that ends with the test, if not before.
func run(t *testing.T, config Config) *running {
	t.Helper()
	f, err := New(config, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{Forwarder: f, t: t, ended: make(chan error, 1), stop: cancel}
	go func() { r.ended <- f.Run(ctx) }()
	t.Cleanup(cancel)
	return r
}

// wait waits until Run has returned.
func (r *running) wait() {
	r.t.Helper()
	require.NoError(r.t, <-r.ended)
}

// end closes the Forwarder and waits until Run has returned.
func (r *running) end() {
	r.t.Helper()
	require.NoError(r.t, r.Close())
	r.wait()
}

// bubble runs a test in virtual time. It fails if a goroutine is left.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, f)
}

// deadIDs returns the numbers of the dead letters of a destination.
func (s *fakeOutbox) deadIDs(destination string) []int64 {
	f := s.feed(destination)
	f.mu.Lock()
	defer f.mu.Unlock()
	ids := []int64{}
	for id := range f.dead {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// failedAttempts returns how many attempts a row has spent.
func (s *fakeOutbox) failedAttempts(destination string, number int64) int {
	f := s.feed(destination)
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.attempts[number]
}

// reason returns why a row is a dead letter.
func (s *fakeOutbox) reason(destination string, number int64) error {
	f := s.feed(destination)
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead[number]
}

// mostOut returns how many batches were out at the same time.
func (s *fakeOutbox) mostOut(destination string) int {
	f := s.feed(destination)
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mostAtOnce
}

func (s *fakeOutbox) ackedIDs(destination string) []int64 {
	f := s.feed(destination)
	f.mu.Lock()
	defer f.mu.Unlock()
	ids := []int64{}
	for id := range f.acked {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// sorted returns the numbers in falling order.
func sorted(numbers []int) []int {
	numbers = slices.Clone(numbers)
	slices.Sort(numbers)
	slices.Reverse(numbers)
	return numbers
}
