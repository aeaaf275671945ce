package tests

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/cursor"
)

// A group is removed with all that is kept for it alone, and nothing of others. One
// of that name that comes later is a new one.
func TestDropGroup(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(6)
	consumer := f.consumer(nil)
	for _, group := range []string{"old", "other"} {
		for _, topic := range []string{"topic", "second"} {
			subscriber, _ := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: group, Shards: 2}, topic)
			require.NoError(t, subscriber.Close())
		}
		f.exec("INSERT INTO outbox.deferred (due_at, topic, uuid, target_group) VALUES (now() + interval '1 hour', 'topic', 'r', $1)", group)
		f.exec("INSERT INTO outbox.inbox (consumer_group, uuid) VALUES ($1, 'handled')", group)
		f.exec(`INSERT INTO outbox.dead_letters (consumer_group, topic, uuid, origin_era, origin_id, created_at, attempts, error)
			VALUES ($1, 'topic', 'd', 1, 1, now(), 1, 'e')`, group)
		f.exec("INSERT INTO outbox.members (holder, consumer_group, topic) VALUES ('died long ago', $1, 'topic')", group)
	}
	f.exec("INSERT INTO outbox.deferred (due_at, topic, uuid) VALUES (now() + interval '1 hour', 'topic', 'scheduled')")
	require.NoError(t, publisher.Publish("topic", sent...))
	count := func(table, group string) int {
		column := "consumer_group"
		if table == "deferred" {
			column = "target_group"
		}
		return f.number("SELECT count(*)::int FROM outbox."+table+" WHERE "+column+" = $1", group)
	}
	tables := []string{"cursors", "deferred", "inbox", "dead_letters", "members"}
	counts := func(group string) (list []int) {
		for _, table := range tables {
			list = append(list, count(table, group))
		}
		return list
	}
	// Living members come and go with their processes.
	require.Eventually(t, func() bool { return count("members", "old") == 1 && count("members", "other") == 1 }, waitFor, 5*time.Millisecond)

	for _, dry := range []bool{true, false} {
		result, err := consumer.DropGroup(t.Context(), "old", outbox.DropOptions{Topic: "second", DryRun: dry, Actor: "me", Reason: "gone"})
		require.NoError(t, err)
		require.Equal(t, outbox.DropResult{Topics: 1, Cursors: 2}, result)
	}
	require.Equal(t, []int{2, 1, 1, 1, 1}, counts("old"))
	for _, dry := range []bool{true, false} {
		result, err := consumer.DropGroup(t.Context(), "old", outbox.DropOptions{DeadLetters: true, DryRun: dry})
		require.NoError(t, err)
		require.Equal(t, outbox.DropResult{Topics: 1, Cursors: 2, Retries: 1, DeadLetters: 1}, result)
	}
	require.Equal(t, []int{0, 0, 0, 0, 0}, counts("old"))
	require.Equal(t, []int{4, 1, 1, 1, 1}, counts("other"))
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.deferred WHERE uuid = 'scheduled'"))
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letter_log WHERE action = 'discarded' AND consumer_group = 'old'"))

	events, err := consumer.GroupLog(t.Context(), "old", 0, 0)
	require.NoError(t, err)
	require.Len(t, events, 2)
	require.Equal(t, []any{outbox.GroupDropped, "me", "gone", "second"}, []any{events[0].Action, events[0].Actor, events[0].Reason, events[0].Topic})
	rest, err := consumer.GroupLog(t.Context(), "", events[0].ID, 5)
	require.NoError(t, err)
	require.Equal(t, events[1:], rest)
	_, err = consumer.DropGroup(t.Context(), "old", outbox.DropOptions{})
	require.ErrorIs(t, err, outbox.ErrUnknownGroup)

	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "old"}, "topic")
	requireNext(t, messages, sent...)
}

// A group in use is not removed by mistake: the error says who uses it. When they
// are gone it is.
func TestDropGroupThatIsInUse(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(2)...))
	consumer, admin := f.consumer(nil), f.consumer(nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "group"}, "topic")
	receive(t, messages, 2)
	result, err := admin.DropGroup(t.Context(), "group", outbox.DropOptions{})
	require.ErrorIs(t, err, outbox.ErrGroupSubscribed)
	var refused *outbox.GroupSubscribedError
	require.ErrorAs(t, err, &refused)
	host, _ := os.Hostname()
	require.Equal(t, []outbox.GroupMember{{Holder: refused.Members[0].Holder, Host: host, PID: os.Getpid(), Topic: "topic"}}, refused.Members)
	require.Equal(t, refused.Members, result.Members)
	require.ErrorContains(t, err, refused.Members[0].Holder)
	require.ErrorContains(t, err, "DropOptions.Force")
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors"))
	dry, err := admin.DropGroup(t.Context(), "group", outbox.DropOptions{DryRun: true})
	require.NoError(t, err)
	require.Equal(t, refused.Members, dry.Members)

	require.NoError(t, subscriber.Close())
	require.Eventually(t, func() bool {
		_, err := admin.DropGroup(t.Context(), "group", outbox.DropOptions{})
		return err == nil
	}, waitFor, 5*time.Millisecond)
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.cursors"))
}

// A group is removed under the hands of its subscriber: what it acks then makes no
// position again, it says once what has happened, and it delivers again when
// somebody subscribes.
func TestDropGroupUnderItsSubscriber(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(4)
	require.NoError(t, publisher.Publish("topic", sent...))
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[:2]...)
	inFlight := <-messages
	result, err := consumer.DropGroup(t.Context(), outbox.DefaultConsumerGroup, outbox.DropOptions{Force: true})
	require.NoError(t, err)
	require.Len(t, result.Members, 1)
	select {
	case <-inFlight.Context().Done():
		require.ErrorIs(t, context.Cause(inFlight.Context()), outbox.ErrLeaseLost)
	case <-time.After(waitFor):
		require.FailNow(t, "the lease was not lost")
	}
	inFlight.Ack()
	const says = "Nothing is delivered any more"
	for _, entry := range book.await(t, 1, says) {
		require.ErrorIs(t, entry.Err, outbox.ErrGroupRemoved)
		require.Equal(t, "topic", entry.Fields["topic"])
	}
	require.ErrorIs(t, consumer.Status().Ready(), outbox.ErrGroupRemoved)
	require.Len(t, consumer.Status().Subscriptions, 1)
	require.False(t, consumer.Status().Subscriptions[0].Holding)
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.cursors"))

	second, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	require.NoError(t, second.SubscribeInitialize("topic"))
	requireNext(t, messages, sent...)
	require.NoError(t, consumer.Status().Ready())
	require.Len(t, book.await(t, 1, says), 1)
}

// A cursor is removed, made again, and taken by the same process; a checkpoint of
// the first one comes late. It must not fit the second one.
func TestLateCheckpointOfARemovedCursor(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	store := cursor.NewStore(oddSchema, "holder")
	key := cursor.Key{Group: "group", Topic: "topic"}
	require.NoError(t, store.MarkLife(t.Context(), f.pool))
	take := func() cursor.Held {
		f.ensure(t, store, key)
		held, err := store.Claim(t.Context(), f.pool, []cursor.Wanted{{Key: key}}, nil)
		require.NoError(t, err)
		require.Len(t, held, 1)
		return held[0]
	}
	first := take()
	_, err := f.consumer(nil).DropGroup(t.Context(), "group", outbox.DropOptions{})
	require.NoError(t, err)
	second := take()
	saved, err := saveOnce(t.Context(), f, store, first)
	require.NoError(t, err)
	require.False(t, saved)
	saved, err = saveOnce(t.Context(), f, store, second)
	require.NoError(t, err)
	require.True(t, saved)
}

// Two at once: one removes it, the other finds none. A checkpoint in between is not
// waited for in a circle.
func TestDropGroupTwice(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{Shards: 8}, nil)
	require.NoError(t, err)
	require.NoError(t, subscriber.SubscribeInitialize("topic"))
	errs := make(chan error, 4)
	for range cap(errs) {
		go func() {
			_, err := consumer.DropGroup(t.Context(), outbox.DefaultConsumerGroup, outbox.DropOptions{})
			errs <- err
		}()
	}
	removed := 0
	for range cap(errs) {
		if err := <-errs; err == nil {
			removed++
		} else {
			require.ErrorIs(t, err, outbox.ErrUnknownGroup)
		}
	}
	require.Equal(t, 1, removed)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.group_log"))
}

// What cannot be is refused before any SQL runs (the context has ended).
func TestDropGroupRefusals(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for want, c := range map[string]struct {
		group   string
		options outbox.DropOptions
	}{
		"group is empty":         {"", outbox.DropOptions{}},
		"outbox: group has 1025": {strings.Repeat("g", 1025), outbox.DropOptions{}},
		"topic":                  {"group", outbox.DropOptions{Topic: "\x00"}},
		"DropOptions.Actor":      {"group", outbox.DropOptions{Actor: strings.Repeat("a", outbox.MaxActorBytes+1)}},
		"DropOptions.Reason":     {"group", outbox.DropOptions{Reason: "\xff"}},
	} {
		_, err := consumer.DropGroup(ended, c.group, c.options)
		require.ErrorContains(t, err, want)
		require.False(t, errors.Is(err, context.Canceled), want)
	}
	for _, options := range []outbox.DropOptions{{}, {DryRun: true}, {Force: true}, {DeadLetters: true}, {Topic: "topic"}} {
		_, err := consumer.DropGroup(t.Context(), "nobody", options)
		require.ErrorIs(t, err, outbox.ErrUnknownGroup)
	}
}

// A group is removed when somebody has just subscribed, and has not come to say so
// where DropGroup looks. The subscription must not be one that seems well and gets
// nothing.
func TestDropGroupBesideASubscribe(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	block := f.begin()
	_, err := block.Exec(t.Context(), f.sql("LOCK TABLE outbox.members IN SHARE MODE")) // what it would say it with
	require.NoError(t, err)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	f.exec("DELETE FROM outbox.cursors")
	require.NoError(t, block.Rollback(t.Context()))
	book.await(t, 1, "Nothing is delivered any more")
	require.ErrorIs(t, consumer.Status().Subscriptions[0].Err, outbox.ErrGroupRemoved)
	require.ErrorIs(t, consumer.Status().Ready(), outbox.ErrGroupRemoved)

	// Somebody else makes it anew: both share it.
	sent := newMessages(3)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	other, _ := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{Ordering: outbox.OrderingByKey, CloseTimeout: -1}, "topic")
	require.NoError(t, other.Close())
	require.Equal(t, uuids(sent), uuids(receive(t, messages, 3)))
	require.Eventually(t, func() bool { return consumer.Status().Ready() == nil }, waitFor, 5*time.Millisecond)
	require.NoError(t, consumer.Status().Subscriptions[0].Err)
}
