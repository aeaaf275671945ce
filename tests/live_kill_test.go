package tests

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// liveChild tells a child process that reads the WAL what to do, as JSON in the
// environment.
const liveChild = "OUTBOX_TEST_LIVE_CHILD"

// liveChildConfig is its value.
type liveChildConfig struct {
	URL, Topic string
	LiveBytes  int
	Lease      time.Duration
	// CheckpointInterval is how often positions are stored.
	CheckpointInterval time.Duration
	// PausesEvery is after how many messages the handler takes Pause, 0 for
	// never.
	PausesEvery int
	Pause       time.Duration
	// NoAck leaves the first message in flight for ever.
	NoAck bool
	// Waits has the child report that it is ready, and subscribe when it is
	// told to, see subscribe.
	Waits bool
}

// What a child reports, before what it is about: a message's payload up to the
// first space, or the most bytes that were in use on its heap.
const (
	childReady   = "ready"
	childLive    = "live"
	childMessage = "message "
	childHeap    = "heap "
)

func init() { children[liveChild] = consumeLiveAsChild }

// consumeLiveAsChild is consumeAsChild for a consumer of which more is asked.
func consumeLiveAsChild() error {
	var config liveChildConfig
	if err := json.Unmarshal([]byte(os.Getenv(liveChild)), &config); err != nil {
		return err
	}
	db, err := pgxpool.ParseConfig(config.URL)
	if err != nil {
		return err
	}
	consumer, err := outbox.NewConsumer(db, outbox.ConsumerConfig{
		Schema: oddSchema, Mode: outbox.ModeAuto, LiveBytes: config.LiveBytes, Lease: config.Lease,
		PollInterval: 10 * time.Millisecond, CheckpointInterval: config.CheckpointInterval,
	}, testLogger(nil))
	if err != nil {
		return err
	}
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{PageBytes: 1 << 20, CloseTimeout: time.Second}, nil)
	if err != nil {
		return err
	}
	stdin := bufio.NewReader(os.Stdin)
	if config.Waits {
		if _, err := fmt.Fprintln(os.Stdout, childReady); err != nil {
			return err
		}
		if _, err := stdin.ReadByte(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = stdin.ReadByte()
		cancel()
	}()
	messages, err := subscriber.Subscribe(ctx, config.Topic)
	if err != nil {
		return err
	}
	var heap atomic.Uint64
	go reportStatus(ctx, consumer, &heap)
	for n := 1; ; n++ {
		msg, open := <-messages
		if !open {
			break
		}
		number, _, _ := bytes.Cut(msg.Payload, []byte(" "))
		if _, err := fmt.Fprintf(os.Stdout, "%s%s\n", childMessage, number); err != nil {
			return err
		}
		if config.PausesEvery > 0 && n%config.PausesEvery == 0 {
			time.Sleep(config.Pause) // a handler that takes its time
		}
		if config.NoAck {
			<-msg.Context().Done()
			continue
		}
		msg.Ack()
	}
	if _, err := fmt.Fprintf(os.Stdout, "%s%d\n", childHeap, heap.Load()); err != nil {
		return err
	}
	return consumer.Close()
}

// reportStatus reports the moment in which all is read from the WAL, and keeps
// the most bytes that were in use on the heap.
func reportStatus(ctx context.Context, consumer *outbox.Consumer, heap *atomic.Uint64) {
	live := false
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		heap.Store(max(heap.Load(), liveHeap()))
		status := consumer.Status()
		if !live && status.Source == outbox.SourceWAL && len(status.Subscriptions) == 1 && status.Subscriptions[0].Source == outbox.SourceWAL {
			live = true
			if _, err := fmt.Fprintln(os.Stdout, childLive); err != nil {
				return // nobody listens any more
			}
		}
	}
}

// startLiveChild starts a child that is killed when the test ends, if not
// before.
func (f *fixture) startLiveChild(t *testing.T, config liveChildConfig) *child {
	t.Helper()
	config.URL = f.url
	value, err := json.Marshal(config)
	require.NoError(t, err)
	command := exec.Command(os.Args[0]) //nolint:noctx // killed by the test
	command.Env = append(os.Environ(), liveChild+"="+string(value))
	command.Stderr = os.Stderr
	stdin, err := command.StdinPipe()
	require.NoError(t, err)
	stdout, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	c := &child{t: t, command: command, stdin: stdin, lines: make(chan string, 100_000)}
	go func() {
		defer close(c.lines)
		scanner := bufio.NewScanner(stdout)
		for scanner.Scan() {
			c.lines <- scanner.Text()
		}
	}()
	t.Cleanup(func() {
		if command.ProcessState == nil {
			_ = command.Process.Kill() // it may have ended by itself
			for range c.lines {
			}
			_ = c.wait()
		}
	})
	return c
}

// subscribe tells a child that waits to go on.
func (c *child) subscribe() {
	c.t.Helper()
	_, err := c.stdin.(io.Writer).Write([]byte{'\n'})
	require.NoError(c.t, err)
}

// nextIs requires the child's next report.
func (c *child) nextIs(line string) {
	c.t.Helper()
	require.Equal(c.t, line, await(c.t, c.lines))
}

// killed kills the child and returns what it had still reported.
func (c *child) killed() (lines []string) {
	c.t.Helper()
	c.kill()
	for line := range c.lines {
		lines = append(lines, line)
	}
	require.Error(c.t, c.wait())
	return lines
}

// stopped is killed for a clean end.
func (c *child) stopped() (lines []string) {
	c.t.Helper()
	c.stop()
	for line := range c.lines {
		lines = append(lines, line)
	}
	require.NoError(c.t, c.wait())
	return lines
}

// TestLiveKill kills a process that reads the WAL, one test after the other,
// since each looks at the whole server.
func TestLiveKill(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{})
	for _, test := range []struct {
		name string
		run  func(t *testing.T, f *fixture)
	}{
		{"while it is live", testKillWhileLive},
		{"while its slot is being created", testKillWhileSlotIsCreated},
		{"while a message is in flight", testKillWhileInFlight},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, fixtureAt(t, pgtest.DatabaseOn(t, server))) })
	}
}

// awaitNoSlot waits until no stream has left a slot or a sender, and returns how
// long it took.
func (f *fixture) awaitNoSlot(t testing.TB, patience time.Duration) time.Duration {
	t.Helper()
	begin := time.Now()
	require.Eventually(t, func() bool {
		return f.number(`SELECT count(*)::int FROM pg_replication_slots`)+
			f.number(`SELECT count(*)::int FROM pg_stat_activity WHERE backend_type = 'walsender'`) == 0
	}, patience, 5*time.Millisecond, "a slot is left, or its sender")
	return time.Since(begin)
}

// A process that is killed leaves its slot behind, for good, and it keeps all
// WAL from then on. Here it goes with its connection. Nothing is lost, and what
// comes again is no more than what was handed out since the last position was
// stored.
func testKillWhileLive(t *testing.T, f *fixture) {
	const kills, writers, topic = 3, 3, "changes"
	w := newWorkload(t, f, topic, 20, writers)
	writing, stopWriting := context.WithCancel(t.Context())
	written := make(chan struct{})
	go func() {
		defer close(written)
		w.run(t, writing, writers, uint64(time.Now().UnixNano()))
	}()
	defer func() {
		stopWriting()
		<-written
	}()

	var l ledger
	take := func(line string) {
		if payload, ok := strings.CutPrefix(line, childMessage); ok {
			l.record(t, message.NewMessage("", []byte(payload)))
		}
	}
	start := func() *child {
		return f.startLiveChild(t, liveChildConfig{Topic: topic, Lease: outbox.MinLease, CheckpointInterval: childCheckpoint})
	}
	var gone time.Duration
	for i := range kills {
		c := start()
		for line := ""; line != childLive; {
			line = await(t, c.lines)
			take(line)
		}
		require.Equal(t, 1, f.slots())
		for range 1 + 40*i {
			take(await(t, c.lines))
		}
		for _, line := range c.killed() {
			take(line)
		}
		gone = max(gone, f.awaitNoSlot(t, 10*time.Second))
	}
	stopWriting()
	<-written
	c := start()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for line := range c.lines {
			take(line)
		}
	}()
	f.awaitStored(t, topic)
	c.stop()
	<-ended
	require.NoError(t, c.wait())
	f.awaitNoSlot(t, 10*time.Second)
	v := w.judge(t, &l)
	t.Logf("%d kills, %s; slots were gone after %s at most", kills, v, gone)
	require.Zero(t, v.Lost, "lost")
	require.Zero(t, v.Invented, "invented")
	require.Zero(t, v.OutOfOrder, "out of order")
	require.Less(t, v.Duplicated, v.Committed/2, "positions are hardly ever stored")
}

// A slot's creation waits for the transactions that are running, and does so on
// the server when its client is long dead, keeping WAL all the time. It is given
// up after a while.
func testKillWhileSlotIsCreated(t *testing.T, f *fixture) {
	f.writeWAL(0)
	config := liveChildConfig{Topic: "topic", Lease: outbox.MinLease, Waits: true}
	creating := func() {
		t.Helper()
		require.Eventually(t, func() bool {
			return f.number(`SELECT count(*)::int FROM pg_stat_activity
				WHERE backend_type = 'walsender' AND query LIKE 'CREATE_REPLICATION_SLOT%' AND wait_event_type = 'Lock'`) == 1
		}, waitFor, 2*time.Millisecond, "no slot is being created")
	}
	late := &lateTransaction{f: f, t: t}
	requireOpen := func() {
		t.Helper()
		late.exec("INSERT INTO public.ballast VALUES (2, 'open still')")
	}

	c := f.startLiveChild(t, config)
	c.nextIs(childReady)
	late.begin()
	requireOpen()
	c.subscribe()
	creating()
	require.Equal(t, 1, f.slots())
	c.killed()
	gone := f.awaitNoSlot(t, 5*time.Second)
	requireOpen()
	late.commit()

	// One that lives on gives up, too, polls, and tries again afterwards.
	c = f.startLiveChild(t, config)
	c.nextIs(childReady)
	late.begin()
	requireOpen()
	c.subscribe()
	creating()
	givenUp := f.awaitNoSlot(t, 5*time.Second)
	publisher := f.publisher(outbox.PublisherConfig{})
	publishNumbers(t, publisher, "topic", 1, 3)
	for i := 1; i <= 3; i++ {
		c.nextIs(childMessage + strconv.Itoa(i))
	}
	requireOpen()
	late.commit()
	c.nextIs(childLive)
	publishNumbers(t, publisher, "topic", 4, 4)
	c.nextIs(childMessage + "4")
	c.stopped()
	f.awaitNoSlot(t, 5*time.Second)

	// One that is closed does not wait for it.
	consumer := f.consumer(readsWAL)
	late.begin()
	requireOpen()
	f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	creating()
	begin := time.Now()
	require.NoError(t, consumer.Close())
	closed := time.Since(begin)
	require.Less(t, closed, maxDelay)
	afterClose := f.awaitNoSlot(t, 5*time.Second)
	requireOpen()
	late.commit()
	t.Logf("slot and sender were gone %s after the kill, %s after the beginning of a creation that was given up, and %s after Close, which took %s",
		gone, givenUp, afterClose, closed)
}

// A handler never acks, the server is told nevertheless that all was received,
// and after a restart the message does not come again. Here the position in the
// table says what was handled. Field case F21.
func testKillWhileInFlight(t *testing.T, f *fixture) {
	publisher := f.publisher(outbox.PublisherConfig{})
	// In flight is the first message, and the other one waits behind it.
	awaitKeepalives := func() {
		t.Helper()
		for range 3 {
			lsn := f.text("SELECT pg_current_wal_insert_lsn()::text")
			f.writeWAL(1)
			require.Eventually(t, func() bool {
				return f.number("SELECT count(*)::int FROM pg_replication_slots WHERE confirmed_flush_lsn > $1::text::pg_lsn", lsn) == 1
			}, waitFor, 10*time.Millisecond, "nothing is confirmed")
		}
	}
	config := liveChildConfig{Topic: "topic", Lease: outbox.MinLease, CheckpointInterval: childCheckpoint, NoAck: true}
	c := f.startLiveChild(t, config)
	c.nextIs(childLive)
	publishNumbers(t, publisher, "topic", 1, 2)
	c.nextIs(childMessage + "1")
	awaitKeepalives()
	require.Empty(t, c.killed())
	f.awaitNoSlot(t, 10*time.Second)

	// The same with a clean end.
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode, c.Lease = outbox.ModeAuto, outbox.MinLease })
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{CloseTimeout: -1}, "topic")
	for _, number := range []string{"1", "2"} {
		require.Equal(t, number, string(receive(t, messages, 1)[0].Payload))
	}
	awaitLive(t, consumer)
	publishNumbers(t, publisher, "topic", 3, 4)
	require.Equal(t, "3", string(nextMessage(t, messages).Payload))
	awaitKeepalives()
	require.NoError(t, subscriber.Close())
	require.NoError(t, consumer.Close())
	f.awaitNoSlot(t, 10*time.Second)

	config.NoAck = false
	c = f.startLiveChild(t, config)
	var numbers []string
	for live := false; len(numbers) < 2 || !live; {
		line := await(t, c.lines)
		if live = live || line == childLive; line != childLive {
			numbers = append(numbers, strings.TrimPrefix(line, childMessage))
		}
	}
	require.Equal(t, []string{"3", "4"}, numbers)
	require.Len(t, c.stopped(), 1, "the heap, and no message")
	t.Log("what was in flight and what waited behind it came again, after a kill and after a clean end")
}

// After a clean end nothing comes again, wherever it hits: with all acked, after
// a pause, in the middle of a transaction, where the position is a snapshot and
// the rows that were handed out beyond it. No slot is left, and what is published
// meanwhile arrives. Field cases F23, F24, F40.
func TestLiveCloseRepeatsNothing(t *testing.T) {
	t.Parallel()

	const rounds, burst = 10, 400
	f, _ := newOwnFixture(t, pgtest.Options{})
	publisher := f.publisher(outbox.PublisherConfig{})
	sent, received, ahead := 0, 0, 0
	publish := func(n int) {
		t.Helper()
		batch := make([]*message.Message, n)
		for i := range batch {
			batch[i] = numbered(sent, 10)
			sent++
		}
		require.NoError(t, publisher.Publish("topic", batch...))
	}
	// with consumes until it is live, and on with what do takes, and closes.
	with := func(do func(take func(n int))) {
		t.Helper()
		consumer := f.consumer(readsWAL)
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		take := func(n int) {
			t.Helper()
			for range n {
				require.Equal(t, received, numberOf(t, receive(t, messages, 1)[0]), "lost, repeated or out of order")
				received++
			}
		}
		take(sent - received)
		awaitLive(t, consumer)
		do(take)
		require.NoError(t, consumer.Close())
		f.awaitNoSlot(t, 5*time.Second)
		ahead += f.number("SELECT jsonb_array_length(ahead) FROM outbox.cursors")
	}

	with(func(take func(n int)) { // F24: closed with the last ack
		publish(100)
		take(100)
	})
	publish(5) // F40: published while closed
	with(func(take func(n int)) {
		publish(10)
		take(10)
		f.awaitStored(t, "topic") // F23: an idle end
	})
	before := ahead
	for round := range rounds {
		with(func(take func(n int)) {
			var others sync.WaitGroup
			others.Go(func() { // the snapshots move on meanwhile
				for range 10 {
					assert.NoError(t, publisher.Publish("another topic", newMessages(1)...))
				}
			})
			publish(burst)
			take(1 + round*burst/rounds)
			publish(burst)
			others.Wait()
		})
	}
	with(func(func(n int)) {})
	last := newMessages(1)
	require.NoError(t, publisher.Publish("topic", last...))
	consumer := f.consumer(readsWAL)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, last...)
	require.Equal(t, sent, received)

	// A Consumer without subscriptions has no slot either, and gets one again.
	awaitLive(t, consumer)
	require.NoError(t, subscriber.Close())
	awaitPolling(t, consumer, "nobody subscribes")
	f.awaitNoSlot(t, 5*time.Second)
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	last = newMessages(1)
	require.NoError(t, publisher.Publish("topic", last...))
	requireNext(t, messages, last...)
	require.Positive(t, ahead-before, "no end was in the middle of a transaction: the test proves nothing")
	t.Logf("closed %d times, %d messages, each once; %d rows ahead of a stored snapshot", rounds+3, received, ahead)
}
