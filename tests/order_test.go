package tests

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Environment of a replica that handles in parallel, and fails now and then.
const (
	orderURL   = "OUTBOX_TEST_ORDER_URL"
	orderRetry = "OUTBOX_TEST_ORDER_RETRY"
	orderMode  = "OUTBOX_TEST_ORDER_MODE"

	orderTopic  = "changes"
	orderShards = 8
	orderLease  = outbox.MinLease
)

// handleAsReplica handles until its standard input ends. One message of twenty
// fails; what does not is reported with the time, before it is acked.
func handleAsReplica() error {
	db, err := pgxpool.ParseConfig(os.Getenv(orderURL))
	if err != nil {
		return err
	}
	consumer, err := outbox.NewConsumer(db, outbox.ConsumerConfig{
		Schema: oddSchema, PollInterval: 10 * time.Millisecond, CheckpointInterval: 50 * time.Millisecond, Lease: orderLease,
		Mode: outbox.Mode(os.Getenv(orderMode)),
	}, testLogger(nil))
	if err != nil {
		return err
	}
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{
		Ordering: outbox.OrderingByKey, MaxInFlight: 16, Shards: orderShards, PageSize: 50,
		Retry: outbox.RetryConfig{
			Mode: outbox.RetryMode(os.Getenv(orderRetry)), MaxAttempts: 100, MinBackoff: 5 * time.Millisecond, MaxBackoff: 50 * time.Millisecond,
		},
	}, nil)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadByte()
		cancel()
	}()
	messages, err := subscriber.Subscribe(ctx, orderTopic)
	if err != nil {
		return err
	}
	var handlers sync.WaitGroup
	for msg := range messages {
		handlers.Go(func() {
			time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond) // handlers take their time
			if rand.IntN(20) == 0 {
				msg.Nack()
				return
			}
			if msg.Context().Err() != nil {
				return // not ours any more
			}
			if _, err := fmt.Fprintf(os.Stdout, "%d %s\n", time.Now().UnixNano(), msg.Payload); err != nil {
				os.Exit(1)
			}
			msg.Ack()
		})
	}
	handlers.Wait()
	return consumer.Close()
}

// handled is what a replica reports.
type handled struct {
	at     int64
	change change
}

// orderReplica is a process that handles.
type orderReplica struct {
	command *exec.Cmd
	stdin   interface{ Close() error }
	ended   chan struct{}
}

// orderReplicas are several, and what they have reported.
type orderReplicas struct {
	t    *testing.T
	f    *fixture
	env  []string
	list []*orderReplica

	mu      sync.Mutex
	reports []handled
	seen    map[change]bool
}

func (r *orderReplicas) start() {
	r.t.Helper()
	command := exec.Command(os.Args[0]) //nolint:noctx // killed, or stopped, by the test
	command.Env = append(os.Environ(), r.env...)
	command.Stderr = os.Stderr
	stdin, err := command.StdinPipe()
	require.NoError(r.t, err)
	stdout, err := command.StdoutPipe()
	require.NoError(r.t, err)
	require.NoError(r.t, command.Start())
	p := &orderReplica{command: command, stdin: stdin, ended: make(chan struct{})}
	r.list = append(r.list, p)
	go func() {
		defer close(p.ended)
		for scanner := bufio.NewScanner(stdout); scanner.Scan(); {
			at, payload, _ := strings.Cut(scanner.Text(), " ")
			var h handled
			h.at, _ = strconv.ParseInt(at, 10, 64)
			if json.Unmarshal([]byte(payload), &h.change) != nil {
				continue // a line that the kill has cut
			}
			r.mu.Lock()
			r.reports = append(r.reports, h)
			r.seen[h.change] = true
			r.mu.Unlock()
		}
	}()
}

// end ends one, and waits for what it has reported.
func (r *orderReplicas) end(i int, how func(*orderReplica) error) {
	r.t.Helper()
	p := r.list[i]
	require.NoError(r.t, how(p))
	<-p.ended
	_ = p.command.Wait() // it may have been killed
	r.list = slices.Delete(r.list, i, i+1)
}

func (r *orderReplicas) different() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.seen)
}

// Four replicas with eight shards, keys in parallel, handlers that fail, and
// replicas that are killed, or stopped, and replaced: nothing is lost, and the
// order of each key holds, but for what comes again, where failures wait in place.
// Where they are deferred, only that order is given up.
func TestOrderPerKey(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		retry outbox.RetryMode
		mode  outbox.Mode
	}{{outbox.RetryInPlace, outbox.ModePoll}, {outbox.RetryInPlace, outbox.ModeAuto}, {outbox.RetryDeferred, outbox.ModeAuto}} {
		t.Run(string(test.retry)+" "+string(test.mode), func(t *testing.T) {
			const writers, count = 6, 4
			f := newFixture(t)
			w := newWorkload(t, f, orderTopic, 40, writers)
			seed := uint64(number("OUTBOX_TEST_SEED", int(time.Now().UnixNano())))
			random := rand.New(rand.NewPCG(seed, 3000))
			r := &orderReplicas{t: t, f: f, seen: map[change]bool{}, env: []string{
				orderURL + "=" + f.url, orderRetry + "=" + string(test.retry), orderMode + "=" + string(test.mode),
			}}
			for range count {
				r.start()
			}
			writing, cancel := context.WithTimeout(t.Context(), time.Duration(number("OUTBOX_TEST_SECONDS", 4))*time.Second)
			defer cancel()
			written := make(chan struct{})
			go func() {
				defer close(written)
				w.run(t, writing, writers, seed)
			}()
			kills, stops := 0, 0
			for over := false; !over; {
				select {
				case <-written:
					over = true
				case <-time.After(time.Duration(500+random.IntN(1500)) * time.Millisecond):
					i := random.IntN(len(r.list))
					if kills > 0 && random.IntN(3) == 0 {
						stops++
						r.end(i, func(p *orderReplica) error { return p.stdin.Close() })
					} else {
						kills++
						r.end(i, func(p *orderReplica) error { return p.command.Process.Kill() })
					}
					r.start()
				}
			}
			committed := f.number("SELECT count(*)::int FROM outbox.messages WHERE topic = $1 AND target_group IS NULL", orderTopic)
			require.Eventually(t, func() bool { return r.different() >= committed }, waitFor, 10*time.Millisecond,
				"messages are lost; seed %d", seed)
			for len(r.list) > 0 {
				r.end(0, func(p *orderReplica) error { return p.stdin.Close() })
			}
			slices.SortStableFunc(r.reports, func(a, b handled) int { return int(a.at - b.at) })
			var l ledger
			for _, h := range r.reports {
				l.add(h.change)
			}
			v := w.judge(t, &l)
			t.Logf("seed=%d kills=%d stops=%d dead=%d %s", seed, kills, stops, f.number("SELECT count(*)::int FROM outbox.dead_letters"), v)
			require.Zero(t, v.Lost)
			require.Zero(t, v.Invented)
			if test.retry == outbox.RetryInPlace {
				require.Zero(t, v.OutOfOrder)
			}
			require.Zero(t, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
			require.Positive(t, kills)
			// What a kill repeats is what was not stored: far less than all.
			require.Less(t, v.Duplicated, v.Committed/2)
		})
	}
}
