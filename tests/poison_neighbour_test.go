package tests

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	neighbourURL      = "OUTBOX_TEST_NEIGHBOUR_URL"
	neighbourTopics   = 4
	neighbourAttempts = 3
	// neighbourPause is how long a handler takes, and the poison half of it.
	neighbourPause = 400 * time.Millisecond
)

// handleBesidePoison handles several topics, one of which kills.
func handleBesidePoison() error {
	db, err := pgxpool.ParseConfig(os.Getenv(neighbourURL))
	if err != nil {
		return err
	}
	consumer, err := outbox.NewConsumer(db, outbox.ConsumerConfig{
		Schema: oddSchema, PollInterval: 5 * time.Millisecond, CheckpointInterval: 20 * time.Millisecond, Lease: time.Second, Mode: testMode,
	}, testLogger(nil))
	if err != nil {
		return err
	}
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{Retry: outbox.RetryConfig{MaxAttempts: neighbourAttempts}}, nil)
	if err != nil {
		return err
	}
	for i := range neighbourTopics {
		messages, err := subscriber.Subscribe(context.Background(), fmt.Sprint(i))
		if err != nil {
			return err
		}
		go func() {
			for msg := range messages {
				time.Sleep(neighbourPause / 2)
				if string(msg.Payload) == "poison" {
					os.Exit(3)
				}
				time.Sleep(neighbourPause / 2)
				msg.Ack()
			}
		}()
	}
	select {}
}

// A message that ends its process is in flight beside those of other topics, in
// each of its lives, for all topics begin with what may have done it. They are
// not condemned with it.
func TestPoisonSparesOtherTopics(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	for i := range neighbourTopics {
		payload := "good"
		if i == neighbourTopics/2 {
			payload = "poison"
		}
		require.NoError(t, publisher.Publish(fmt.Sprint(i), message.NewMessage(payload, []byte(payload))))
	}
	for lives := 1; f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE payload = 'poison'") == 0; lives++ {
		require.LessOrEqual(t, lives, neighbourAttempts+1, "it goes on killing")
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second+neighbourTopics*neighbourPause)
		command := exec.CommandContext(ctx, os.Args[0])
		command.Env = append(os.Environ(), neighbourURL+"="+f.url)
		command.Stderr = os.Stderr
		err := command.Run()
		cancel()
		var ended *exec.ExitError
		require.True(t, errors.As(err, &ended), "%v", err)
	}
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE payload <> 'poison'"), "neighbours died with it")
	require.Empty(t, f.holes(t, "0"))
}
