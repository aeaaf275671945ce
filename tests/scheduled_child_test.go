package tests

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

// scheduledURL makes the test binary a process that schedules a message and waits
// for it, in the time zone of its environment.
const scheduledURL = "OUTBOX_TEST_SCHEDULED_URL"

// runChild runs the test binary with this in its environment, to its end.
func runChild(t testing.TB, name, value string, env ...string) error {
	ctx, cancel := context.WithTimeout(t.Context(), 2*waitFor)
	defer cancel()
	child := exec.CommandContext(ctx, os.Args[0])
	child.Env = append(append(os.Environ(), name+"="+value), env...)
	output, err := child.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, output)
	}
	return nil
}

// scheduleAsChild publishes a message that is due in two seconds and looks at when
// it comes.
func scheduleAsChild() error {
	ctx, cancel := context.WithTimeout(context.Background(), waitFor)
	defer cancel()
	db, err := pgxpool.ParseConfig(os.Getenv(scheduledURL))
	if err != nil {
		return err
	}
	pool, err := pgxpool.NewWithConfig(ctx, db)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, offset := time.Now().Zone(); offset == 0 && os.Getenv("TZ") != "UTC" {
		return fmt.Errorf("the zone is %s, not %s", time.Local, os.Getenv("TZ"))
	}
	publisher, err := outbox.NewPublisher(pool, outbox.PublisherConfig{Schema: oddSchema}, nil)
	if err != nil {
		return err
	}
	consumer, err := outbox.NewConsumer(db, outbox.ConsumerConfig{Schema: oddSchema, PollInterval: 10 * time.Millisecond, Mode: testMode}, nil)
	if err != nil {
		return err
	}
	defer func() { _ = consumer.Close() }()
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	if err != nil {
		return err
	}
	messages, err := subscriber.Subscribe(ctx, "child")
	if err != nil {
		return err
	}
	begin := time.Now()
	for _, d := range []delay.Delay{delay.For(2 * time.Second), delay.Until(begin.Add(2 * time.Second))} {
		msg := message.NewMessage("1", nil)
		delay.Message(msg, d)
		if err := publisher.Publish("child", msg); err != nil {
			return err
		}
	}
	for range 2 {
		select {
		case msg, ok := <-messages:
			if !ok {
				return fmt.Errorf("the channel was closed")
			}
			until, err := time.Parse(time.RFC3339, msg.Metadata.Get(delay.DelayedUntilKey))
			if err != nil {
				return err
			}
			delivery, _ := outbox.DeliveryFromCtx(msg.Context())
			if delivery.PublishedAt.Before(until) {
				return fmt.Errorf("due at %s, in the log at %s", until, delivery.PublishedAt)
			}
			msg.Ack()
		case <-ctx.Done():
			return fmt.Errorf("no message: %w", ctx.Err())
		}
	}
	return nil
}
