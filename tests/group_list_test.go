package tests

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

// Who is on call asks how far groups are: what they have not had, since when, and
// who should deliver it.
func TestGroups(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(20)
	require.NoError(t, publisher.Publish("topic", sent...))
	f.exec("INSERT INTO outbox.messages (topic, uuid, target_group) VALUES ('topic', 'retry of another', 'another')")
	open := &lateTransaction{f: f, t: t}
	open.begin()
	open.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('topic', 'open')")
	consumer := f.consumer(nil)
	groups := func(filter outbox.GroupFilter) []outbox.GroupStatus {
		list, err := consumer.Groups(t.Context(), filter)
		require.NoError(t, err)
		return list
	}
	require.Equal(t, []outbox.GroupStatus{}, groups(outbox.GroupFilter{}))
	subscriber, _ := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "sharded", Shards: 3}, "topic")
	require.NoError(t, subscriber.Close())
	subscriber, _ = f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "latest", StartFrom: outbox.StartLatest}, "topic")
	require.NoError(t, subscriber.Close())
	// One in flight, three acked, in pages that end inside the window.
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "busy", PageSize: 2}, "topic")
	requireNext(t, messages, sent[:3]...)
	inFlight := <-messages
	var busy outbox.GroupStatus
	require.Eventually(t, func() bool {
		busy = groups(outbox.GroupFilter{ConsumerGroup: "busy"})[0]
		return busy.Lag+busy.Unacked == 17
	}, waitFor, 5*time.Millisecond)
	require.True(t, busy.LagExact)
	require.Equal(t, f.text("SELECT created_at::text FROM outbox.messages WHERE uuid = $1", sent[3].UUID),
		f.text("SELECT $1::timestamptz::text", busy.Oldest))
	require.Positive(t, busy.Behind)
	require.Len(t, busy.Shards, 1)
	host, _ := os.Hostname()
	require.Equal(t, []any{f.text("SELECT holder FROM outbox.cursors WHERE consumer_group = 'busy'"), host, os.Getpid()},
		[]any{busy.Shards[0].Holder, busy.Shards[0].Host, busy.Shards[0].PID})
	require.Less(t, busy.Shards[0].Silent, time.Minute)

	list := groups(outbox.GroupFilter{Topic: "topic"})
	require.Len(t, list, 3)
	require.Equal(t, []string{"busy", "latest", "sharded"}, []string{list[0].ConsumerGroup, list[1].ConsumerGroup, list[2].ConsumerGroup})
	require.Zero(t, list[1].Lag)
	require.True(t, list[1].Oldest.IsZero())
	require.EqualValues(t, 20, list[2].Lag)
	require.Len(t, list[2].Shards, 3)
	require.Equal(t, list[2].Lag, list[2].Shards[0].Lag+list[2].Shards[1].Lag+list[2].Shards[2].Lag)
	require.False(t, list[2].Resharding)
	require.NoError(t, consumer.Reshard(t.Context(), "sharded", "topic", 2))
	require.True(t, groups(outbox.GroupFilter{ConsumerGroup: "sharded"})[0].Resharding)

	// Counting ends somewhere, and pages do.
	part := groups(outbox.GroupFilter{ConsumerGroup: "sharded", Count: 5})[0]
	require.False(t, part.LagExact)
	require.LessOrEqual(t, part.Lag, int64(5*3))
	first := groups(outbox.GroupFilter{Limit: 2})
	require.Len(t, first, 2)
	rest := groups(outbox.GroupFilter{Limit: 2, AfterGroup: first[1].ConsumerGroup, AfterTopic: first[1].Topic})
	require.Len(t, rest, 1)
	require.Equal(t, "sharded", rest[0].ConsumerGroup)

	// What was open, with an id below many others', counts when it is committed.
	require.NoError(t, publisher.Publish("topic", newMessages(2)...))
	require.EqualValues(t, 2, groups(outbox.GroupFilter{ConsumerGroup: "latest"})[0].Lag)
	open.commit()
	require.EqualValues(t, 3, groups(outbox.GroupFilter{ConsumerGroup: "latest"})[0].Lag)
	require.True(t, inFlight.Ack())
	receive(t, messages, 19)
	require.Eventually(t, func() bool {
		busy := groups(outbox.GroupFilter{ConsumerGroup: "busy"})[0]
		return busy.Lag+busy.Unacked == 0 && busy.Oldest.IsZero()
	}, waitFor, 5*time.Millisecond)
}

// The role of a consumer may look, move and remove; and the statements run behind a
// transaction pooler.
func TestGroupsWithLeastPrivilege(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(3)...))
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	for _, pooled := range []bool{false, true} {
		consumer := f.consumerOn(f.poolAs(role).Config(), func(c *outbox.ConsumerConfig) { c.Mode, c.TransactionPooler = outbox.ModePoll, pooled })
		subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "group"}, nil)
		require.NoError(t, err)
		require.NoError(t, subscriber.SubscribeInitialize("topic"))
		many, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "many"}, nil)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		_, err = many.SubscribeBatches(ctx, outbox.AllTopics(), 1)
		require.NoError(t, err)
		cancel()
		require.NoError(t, many.Close())
		list, err := consumer.Groups(t.Context(), outbox.GroupFilter{})
		require.NoError(t, err)
		require.Len(t, list, 2)
		result, err := consumer.Seek(t.Context(), "group", "topic", outbox.SeekTime(time.Now().Add(-time.Hour)), outbox.SeekOptions{})
		require.NoError(t, err)
		require.Zero(t, result.Skipped)
		_, err = consumer.SeekBatches(t.Context(), "many", outbox.SeekLatest(), outbox.SeekOptions{AllowSkip: true, DropRetries: true})
		require.NoError(t, err)
		for _, group := range []string{"group", "many"} {
			require.Eventually(t, func() bool {
				_, err := consumer.DropGroup(t.Context(), group, outbox.DropOptions{DeadLetters: true})
				return err == nil
			}, waitFor, 5*time.Millisecond)
		}
		events, err := consumer.GroupLog(t.Context(), "", 0, 0)
		require.NoError(t, err)
		require.NotEmpty(t, events)
		require.Equal(t, role, events[0].Actor)
	}
}

// What cannot be is refused before any SQL runs (the context has ended).
func TestGroupsRefusals(t *testing.T) {
	t.Parallel()

	consumer := newFixture(t).consumer(nil)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for want, filter := range map[string]outbox.GroupFilter{
		"GroupFilter.ConsumerGroup has 1025": {ConsumerGroup: strings.Repeat("g", 1025)},
		"GroupFilter.Topic":                  {Topic: "\x00"},
		"GroupFilter.AfterGroup":             {AfterGroup: "\xff"},
		"GroupFilter.AfterTopic":             {AfterTopic: "\xff"},
		fmt.Sprint("GroupFilter.Limit must be between 0 and ", outbox.MaxGroupPage): {Limit: outbox.MaxGroupPage + 1},
		"GroupFilter.Limit must be": {Limit: -1},
		"GroupFilter.Count must be": {Count: -1},
	} {
		_, err := consumer.Groups(ended, filter)
		require.ErrorContains(t, err, want)
		require.NotErrorIs(t, err, context.Canceled, want)
	}
	for _, args := range [][2]int{{-1, 0}, {0, -1}, {0, outbox.MaxGroupPage + 1}} {
		_, err := consumer.GroupLog(ended, "group", int64(args[0]), args[1])
		require.ErrorContains(t, err, "GroupLog needs")
	}
}
