package tests

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Environment of a child whose handler ends the process.
const (
	poisonURL   = "OUTBOX_TEST_POISON_URL"
	poisonFirst = "OUTBOX_TEST_POISON_FIRST"

	poisonTopic    = "poison"
	poisonInFlight = 64
	poisonAttempts = 3
	poisonDrained  = "drained"
)

// handleAsPoisoned handles 64 messages at a time and dies of the one that says
// poison. In its first life it does so when all are in flight, of which none is
// acked. It reports each start of a handler before anything else.
func handleAsPoisoned() error {
	db, err := pgxpool.ParseConfig(os.Getenv(poisonURL))
	if err != nil {
		return err
	}
	consumer, err := outbox.NewConsumer(db, outbox.ConsumerConfig{
		Schema: oddSchema, PollInterval: 5 * time.Millisecond, CheckpointInterval: 20 * time.Millisecond, Lease: time.Second, Mode: testMode,
	}, testLogger(nil))
	if err != nil {
		return err
	}
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{
		Ordering: outbox.OrderingUnordered, MaxInFlight: poisonInFlight, Retry: outbox.RetryConfig{MaxAttempts: poisonAttempts},
	}, nil)
	if err != nil {
		return err
	}
	messages, err := subscriber.Subscribe(context.Background(), poisonTopic)
	if err != nil {
		return err
	}
	first := os.Getenv(poisonFirst) != ""
	var started atomic.Int64
	all := make(chan struct{})
	for msg := range messages {
		go func() {
			delivery, _ := outbox.DeliveryFromCtx(msg.Context())
			if _, err := fmt.Fprintf(os.Stdout, "%s %d\n", msg.Payload, delivery.Attempt); err != nil {
				os.Exit(2)
			}
			if first {
				if started.Add(1) == poisonInFlight {
					close(all)
				}
				<-all
				if string(msg.Payload) != "poison" {
					select {} // still at it when the process ends
				}
			}
			if string(msg.Payload) == "poison" {
				os.Exit(3)
			}
			msg.Ack()
		}()
	}
	return consumer.Close()
}

// A message that kills its process would kill it for ever, for nobody is there
// to nack it. It counts as an attempt, and ends as a dead letter after as many
// starts as it has attempts, while the 63 that were in flight beside it do not:
// they are all delivered, and none of them has counted anything.
func TestPoisonProcess(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	const others = 200
	var sent []*message.Message
	for i := range others + 1 {
		payload := fmt.Sprintf("neighbour-%d", i)
		if i == poisonInFlight/2 {
			payload = "poison"
		}
		sent = append(sent, message.NewMessage(fmt.Sprint(i), []byte(payload)))
	}
	require.NoError(t, publisher.Publish(poisonTopic, sent...))

	starts := map[string][]string{}
	lives := 0
	for f.number("SELECT count(*)::int FROM outbox.dead_letters") == 0 {
		lives++
		require.LessOrEqual(t, lives, poisonAttempts+1, "it goes on killing: %v", starts["poison"])
		command := exec.CommandContext(t.Context(), os.Args[0])
		command.Env = append(os.Environ(), poisonURL+"="+f.url)
		if lives == 1 {
			command.Env = append(command.Env, poisonFirst+"=1")
		}
		command.Stderr = os.Stderr
		stdout, err := command.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, command.Start())
		lines := make(chan string)
		go func() {
			defer close(lines)
			scanner := bufio.NewScanner(stdout)
			for scanner.Scan() {
				lines <- scanner.Text()
			}
		}()
		ended := false
		for !ended {
			select {
			case line, ok := <-lines:
				if !ok {
					ended = true
					break
				}
				name, attempt, found := strings.Cut(line, " ")
				require.True(t, found, line)
				starts[name] = append(starts[name], attempt)
			case <-time.After(200 * time.Millisecond):
				// The last life does not end by itself.
				if len(starts) == others+1 && f.number("SELECT count(*)::int FROM outbox.dead_letters") > 0 {
					require.NoError(t, command.Process.Kill())
				}
			}
		}
		_ = command.Wait()
	}
	t.Logf("lives=%d starts of the poison=%v", lives, starts["poison"])
	// Beside others, in a wave, and by itself, with which it is known to have ended
	// all three.
	require.Equal(t, []string{"1", "1", "1"}, starts["poison"])
	require.Equal(t, poisonAttempts+1, lives)
	require.Len(t, starts, others+1, "neighbours are missing")
	for name, attempts := range starts {
		for _, attempt := range attempts {
			require.True(t, name == "poison" || attempt == "1", "%s has counted: %v", name, attempts)
		}
	}
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE payload = 'poison' AND attempts = $1", poisonAttempts))
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letter_log WHERE action = 'died'"))
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
}
