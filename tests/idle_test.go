package tests

import (
	"strconv"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// A timer and a query for each topic, times the number of processes, load a
// server with doing nothing. However many topics a process waits for, it asks
// once per poll interval. After an idle time a message is not late. Field case
// F104.
func TestManyIdleTopics(t *testing.T) {
	t.Parallel()

	const topics, seconds = 50, 5
	// A server of its own: a slot waits for everybody's transactions.
	f, _ := newOwnFixture(t, pgtest.Options{})
	load := &loadCounter{}
	db := f.pool.Config()
	db.ConnConfig.Tracer = load
	consumer := f.consumerOn(db, func(c *outbox.ConsumerConfig) {
		c.PollInterval, c.CheckpointInterval = outbox.DefaultPollInterval, outbox.DefaultCheckpointInterval
	})
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	channels := make([]<-chan *message.Message, topics)
	for i := range channels {
		channels[i], err = subscriber.Subscribe(t.Context(), strconv.Itoa(i))
		require.NoError(t, err)
	}
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(topics)
	for i, msg := range sent {
		require.NoError(t, publisher.Publish(strconv.Itoa(i), msg))
	}
	for i, messages := range channels {
		requireNext(t, messages, sent[i])
	}
	for i := range channels {
		f.awaitStored(t, strconv.Itoa(i))
	}

	if testMode != outbox.ModePoll {
		awaitLive(t, consumer)
	}
	before := load.statements.Load()
	begin := time.Now()
	time.Sleep(seconds * time.Second) // the time in which nothing is to happen
	statements, took := load.statements.Load()-before, time.Since(begin).Seconds()
	t.Logf("%d statements in %.1f s", statements, took)
	// The watcher and the promoter, ten times a second each, and the lease.
	require.Less(t, float64(statements), 15*took+10)
	require.Greater(t, float64(statements), took, "nobody looks")

	for i, messages := range channels[:10] {
		sent := newMessages(1)
		begin := time.Now()
		require.NoError(t, publisher.Publish(strconv.Itoa(i), sent...))
		requireNext(t, messages, sent...)
		require.Less(t, time.Since(begin), waitFor/2, "only the reader's own look, every half a minute, found it")
	}
}
