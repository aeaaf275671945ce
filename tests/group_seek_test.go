package tests

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/window"
)

// until publishes a last message and returns the UUIDs of those that come before
// it, acked.
func (f *fixture) until(t testing.TB, messages <-chan *message.Message) []string {
	t.Helper()
	last := message.NewMessage(watermill.NewUUID(), nil)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", last))
	before := []string{}
	for {
		msg := receive(t, messages, 1)[0]
		if msg.UUID == last.UUID {
			return before
		}
		before = append(before, msg.UUID)
	}
}

// id is that of a stored message.
func (f *fixture) id(t testing.TB, uuid string) int64 {
	t.Helper()
	var id int64
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT id FROM outbox.messages WHERE uuid = $1"), uuid).Scan(&id))
	return id
}

// seek moves the default group of the topic, and returns the result, which is what
// a dry run said before.
func seek(t testing.TB, consumer *outbox.Consumer, to outbox.SeekTo, options outbox.SeekOptions) outbox.SeekResult {
	t.Helper()
	dry := options
	dry.DryRun = true
	said, err := consumer.Seek(t.Context(), outbox.DefaultConsumerGroup, "topic", to, dry)
	require.NoError(t, err)
	done, err := consumer.Seek(t.Context(), outbox.DefaultConsumerGroup, "topic", to, options)
	require.NoError(t, err)
	require.Equal(t, said, done)
	return done
}

// A read model is thrown away and made anew from all that is stored, by the group
// that has read it before. Other groups do not notice.
func TestSeekReplaysHistory(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(30)
	require.NoError(t, publisher.Publish("topic", sent...))
	consumer := f.consumer(nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 7}, "topic")
	_, others := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "other"}, "topic")
	requireNext(t, messages, sent...)
	requireNext(t, others, sent...)
	f.awaitCaughtUp(t, consumer, 30)

	options := outbox.SeekOptions{Actor: "me", Reason: "new projection"}
	result := seek(t, consumer, outbox.SeekEarliest(), options)
	require.Len(t, result.Holders, 1)
	require.Equal(t, outbox.SeekResult{Again: 30, Exact: true, Holders: result.Holders}, result)
	requireNext(t, messages, sent...)
	require.Empty(t, f.until(t, others))

	events, err := consumer.GroupLog(t.Context(), outbox.DefaultConsumerGroup, 0, 0)
	require.NoError(t, err)
	require.Len(t, events, 1)
	require.Equal(t, []string{"moved", "me", "new projection", "topic"},
		[]string{string(events[0].Action), events[0].Actor, events[0].Reason, events[0].Topic})
	require.JSONEq(t, `30`, f.text("SELECT detail -> 'again' FROM outbox.group_log"))
}

// awaitCaughtUp waits until all messages of the topic, so many, are acked by what is
// stored of the default group.
func (f *fixture) awaitCaughtUp(t testing.TB, consumer *outbox.Consumer, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		result, err := consumer.Seek(t.Context(), outbox.DefaultConsumerGroup, "topic", outbox.SeekEarliest(), outbox.SeekOptions{DryRun: true})
		require.NoError(t, err)
		return int(result.Again) == n
	}, waitFor, 5*time.Millisecond)
}

// A transaction is open while a group is moved, and commits later a message whose
// id is lower than where the group was moved to: it was not visible then, so it
// comes, whereas those with lower ids that were do not.
func TestSeekWithAnOpenTransaction(t *testing.T) {
	t.Parallel()

	for name, to := range map[string]func(f *fixture, at string) outbox.SeekTo{
		"to a message":  func(f *fixture, at string) outbox.SeekTo { return outbox.SeekMessage(0, f.id(t, at)) },
		"to the latest": func(*fixture, string) outbox.SeekTo { return outbox.SeekLatest() },
		"to a time": func(f *fixture, at string) outbox.SeekTo {
			var moment time.Time
			require.NoError(t, f.pool.QueryRow(context.Background(), f.sql("SELECT created_at FROM outbox.messages WHERE uuid = $1"), at).Scan(&moment))
			return outbox.SeekTime(moment)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			publisher := f.publisher(outbox.PublisherConfig{})
			open := &lateTransaction{f: f, t: t}
			open.begin()
			open.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('topic', 'late')")
			sent := newMessages(10)
			require.NoError(t, publisher.Publish("topic", sent...))
			consumer := f.consumer(nil)
			subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			requireNext(t, messages, sent...)
			require.NoError(t, subscriber.Close())

			want := uuids(sent[6:])
			if name == "to the latest" {
				want = []string{}
			}
			require.EqualValues(t, len(want), seek(t, consumer, to(f, sent[6].UUID), outbox.SeekOptions{}).Again)
			_, messages = f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 2}, "topic")
			require.Equal(t, want, f.until(t, messages))
			open.commit()
			require.Equal(t, "late", receive(t, messages, 1)[0].UUID)
			require.Empty(t, f.until(t, messages))
		})
	}
}

// Whoever has the topic when the group is moved stops, and its ack counts for
// nothing; it goes on from the new position, and no other process begins before.
func TestSeekWhileDelivering(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(10)
	require.NoError(t, publisher.Publish("topic", sent...))
	// With the default lease it takes the holder seconds to notice, and the one that
	// stands by a fraction of one to take what is free.
	consumer, admin := f.consumer(nil), f.consumer(nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[:5]...)
	inFlight := <-messages
	_, standby := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	var holder string
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT holder FROM outbox.cursors")).Scan(&holder))

	result := seek(t, admin, outbox.SeekMessage(0, f.id(t, sent[2].UUID)), outbox.SeekOptions{})
	require.Equal(t, []string{holder}, result.Holders)
	select {
	case <-inFlight.Context().Done():
		require.ErrorIs(t, context.Cause(inFlight.Context()), outbox.ErrLeaseLost)
	case msg := <-standby:
		require.FailNow(t, "two deliver at once", "%s", msg.UUID)
	case <-time.After(waitFor):
		require.FailNow(t, "the lease was not lost")
	}
	inFlight.Ack()
	again := []string{}
	for len(again) < 8 {
		select {
		case msg := <-messages:
			again = append(again, msg.UUID)
			msg.Ack()
		case msg := <-standby: // it may get the topic once the other has given it up
			again = append(again, msg.UUID)
			msg.Ack()
		case <-time.After(waitFor):
			require.FailNow(t, "messages missing", "%d", len(again))
		}
	}
	require.Equal(t, uuids(sent[2:]), again)
}

// A checkpoint is under way when the group is moved: it waits for the cursor's
// lock, gets it when the move has committed, and must not store the old position.
func TestSeekWithACheckpointUnderWay(t *testing.T) {
	t.Parallel()

	for name, after := range map[string]struct {
		write func(ctx context.Context, f *fixture, store *cursor.Store, held cursor.Held) (bool, error)
		drop  bool
	}{
		"save": {write: saveOnce},
		"settle": {write: func(ctx context.Context, f *fixture, store *cursor.Store, held cursor.Held) (bool, error) {
			return store.Settle(ctx, f.pool, movedOn(held), cursor.Verdict{Topic: "topic", Era: held.Life.Era, ID: 1, Attempts: 1, After: time.Hour}, false)
		}},
		"save into nothing": {write: saveOnce, drop: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(5)...))
			store := cursor.NewStore(oddSchema, "holder")
			key := cursor.Key{Group: "group", Topic: "topic"}
			f.ensure(t, store, key)
			require.NoError(t, store.MarkLife(t.Context(), f.pool))
			held, err := store.Claim(t.Context(), f.pool, []cursor.Wanted{{Key: key}}, nil)
			require.NoError(t, err)
			require.Len(t, held, 1)
			saved, err := saveOnce(t.Context(), f, store, held[0])
			require.NoError(t, err)
			require.True(t, saved, "the test's write is no good")

			// The move has the cursors, and stops at its log.
			log := &lateTransaction{f: f, t: t}
			log.begin()
			log.exec("LOCK TABLE outbox.group_log IN SHARE MODE")
			consumer := f.consumer(nil)
			moved := make(chan error, 1)
			go func() {
				var err error
				if after.drop {
					_, err = consumer.DropGroup(t.Context(), "group", outbox.DropOptions{})
				} else {
					_, err = consumer.Seek(t.Context(), "group", "topic", outbox.SeekEarliest(), outbox.SeekOptions{})
				}
				moved <- err
			}()
			f.awaitWaiting(t, "group_log")
			type answer struct {
				saved bool
				err   error
			}
			written := make(chan answer, 1)
			go func() {
				saved, err := after.write(t.Context(), f, store, held[0])
				written <- answer{saved, err}
			}()
			f.awaitWaiting(t, "transactionid")
			log.commit()
			require.NoError(t, <-moved)
			require.Equal(t, answer{}, <-written)
			require.Zero(t, f.number("SELECT count(*)::int FROM outbox.deferred"))
			if after.drop {
				require.Zero(t, f.number("SELECT count(*)::int FROM outbox.cursors"))
				return
			}
			require.Equal(t, "past 1:1: 0 holder", f.text("SELECT concat_ws(' ', step, p, floor, holder) FROM outbox.cursors"))
		})
	}
}

// movedOn is a position further on.
func movedOn(held cursor.Held) cursor.Write {
	state := held.State
	state.Position = window.Position{Era: held.Life.Era, Step: window.Idle, P: held.State.Position.P, Floor: 4}
	return cursor.Write{Key: held.Key, Epoch: held.Epoch, State: state, Life: held.Life}
}

func saveOnce(ctx context.Context, f *fixture, store *cursor.Store, held cursor.Held) (bool, error) {
	saved, err := store.Save(ctx, f.pool, []cursor.Write{movedOn(held)})
	return saved[held.Key], err
}

// awaitWaiting waits until a session of this database waits for a lock of a table, or of
// the kind. Tables of other databases may have the same oid, and those of tests do.
func (f *fixture) awaitWaiting(t testing.TB, what string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return f.number(`SELECT count(*)::int FROM pg_locks l JOIN pg_stat_activity a USING (pid) LEFT JOIN pg_class c ON c.oid = l.relation
			WHERE NOT l.granted AND a.datname = current_database() AND (c.relname = $1 OR l.locktype = $1)`, what) > 0
	}, waitFor, 2*time.Millisecond)
}

// All shards are moved to one place, whoever has them.
func TestSeekOfShards(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(40)
	for i, msg := range sent {
		msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint("key ", i%10))
	}
	require.NoError(t, publisher.Publish("topic", sent...))
	shorter := func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease }
	consumer := f.consumer(shorter)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{Shards: 4}, "topic")
	require.ElementsMatch(t, uuids(sent), uuids(receive(t, messages, len(sent))))
	f.awaitCaughtUp(t, consumer, len(sent))

	result := seek(t, consumer, outbox.SeekMessage(0, f.id(t, sent[25].UUID)), outbox.SeekOptions{})
	require.Equal(t, outbox.SeekResult{Again: 15, Exact: true, Holders: result.Holders}, result)
	require.ElementsMatch(t, uuids(sent[25:]), uuids(receive(t, messages, 15)))
	more := newMessages(8)
	require.NoError(t, publisher.Publish("topic", more...))
	require.ElementsMatch(t, uuids(more), uuids(receive(t, messages, len(more))))
}

// The number of shards is being changed, and old ones wait to be read to their
// end: the new ones have all of it from the new position.
func TestSeekWhileShardsAreChanged(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(20)
	require.NoError(t, publisher.Publish("topic", sent[:12]...))
	consumer := f.consumer(nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 2}, "topic")
	requireNext(t, messages, sent[:5]...)
	require.NoError(t, subscriber.Close())
	store := cursor.NewStore(oddSchema, "test")
	topic := cursor.Topic{Group: outbox.DefaultConsumerGroup, Topic: "topic"}
	require.NoError(t, store.Reshard(t.Context(), f.pool, topic, 3))
	made, err := store.Switch(t.Context(), f.pool, topic, nil)
	require.NoError(t, err)
	require.True(t, made)
	require.NoError(t, publisher.Publish("topic", sent[12:]...))
	groups, err := consumer.Groups(t.Context(), outbox.GroupFilter{})
	require.NoError(t, err)
	require.Len(t, groups, 1)
	require.True(t, groups[0].Resharding)
	require.EqualValues(t, 15, groups[0].Lag)

	result := seek(t, consumer, outbox.SeekMessage(0, f.id(t, sent[8].UUID)), outbox.SeekOptions{AllowSkip: true})
	require.Equal(t, outbox.SeekResult{Skipped: 3, Exact: true, Holders: []string{}}, result)
	require.Equal(t, 3, f.number("SELECT count(*)::int FROM outbox.cursors"))
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	require.ElementsMatch(t, uuids(sent[8:]), uuids(receive(t, messages, 12)))
	more := newMessages(8)
	require.NoError(t, publisher.Publish("topic", more...))
	require.ElementsMatch(t, uuids(more), uuids(receive(t, messages, len(more))))
}

// The group reads the WAL when it is moved: it goes back to the table, and on from
// there to the WAL.
func TestSeekWhileLive(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode, c.Lease = outbox.ModeWAL, outbox.MinLease })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	sent := newMessages(12)
	require.NoError(t, publisher.Publish("topic", sent[:2]...))
	requireNext(t, messages, sent[:2]...)
	for range 3 {
		awaitLive(t, consumer)
		require.NoError(t, publisher.Publish("topic", sent[2:]...))
		requireNext(t, messages, sent[2:]...)
		_, err := consumer.Seek(t.Context(), outbox.DefaultConsumerGroup, "topic", outbox.SeekMessage(0, f.id(t, sent[1].UUID)), outbox.SeekOptions{AllowSkip: true})
		require.NoError(t, err)
		requireNext(t, messages, sent[1:]...)
		f.exec("DELETE FROM outbox.messages WHERE uuid = ANY ($1)", uuids(sent[2:]))
	}
}

// Positions in what other clusters have written, and in the server's own.
func TestSeekAcrossClusters(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	var all []string
	begin := time.Now().Add(-100 * time.Hour).Truncate(time.Second)
	for i, by := range []int{-2, -1, 1} {
		for id := 1; id <= 5; id++ {
			uuid := fmt.Sprintf("cluster %d, id %d", by, id)
			f.exec(`INSERT INTO outbox.messages (id, xid, era, topic, uuid, created_at) OVERRIDING SYSTEM VALUE
				VALUES ($1, ($2::bigint)::text::xid8, outbox.era() + $3, 'topic', $4, $5)`, id, 5_000_000+10*by-id, by, uuid, begin.Add(time.Duration(5*i+id)*time.Hour))
			all = append(all, uuid)
		}
	}
	sent := newMessages(6)
	require.NoError(t, publisher.Publish("topic", sent...))
	all = append(all, uuids(sent)...)
	consumer := f.consumer(nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 4}, "topic")
	require.Equal(t, all, uuids(receive(t, messages, len(all))))
	require.NoError(t, subscriber.Close())
	for name, to := range map[string]struct {
		to   outbox.SeekTo
		want []string
	}{
		"earliest":           {outbox.SeekEarliest(), all},
		"latest":             {outbox.SeekLatest(), []string{}},
		"older cluster":      {outbox.SeekMessage(f.era(t)-1, 3), all[7:]},
		"newer cluster":      {outbox.SeekMessage(f.era(t)+1, 3), all[12:]},
		"this cluster":       {outbox.SeekMessage(f.era(t), f.id(t, sent[2].UUID)), all[17:]},
		"time of another":    {outbox.SeekTime(begin.Add(4 * time.Hour)), all[3:]},
		"time before all":    {outbox.SeekTime(begin), all},
		"time of this":       {outbox.SeekTime(begin.Add(50 * time.Hour)), all[15:]},
		"nothing is as late": {outbox.SeekTime(time.Now()), []string{}},
	} {
		if name == "nothing is as late" {
			// Published before, whatever the clocks say of each other.
			f.exec("UPDATE outbox.messages SET created_at = created_at - interval '1 minute' WHERE era = outbox.era()")
		}
		result := seek(t, consumer, to.to, outbox.SeekOptions{AllowSkip: true})
		require.Equal(t, outbox.SeekResult{Again: int64(len(to.want)), Exact: true, Holders: []string{}}, result, name)
		groups, err := consumer.Groups(t.Context(), outbox.GroupFilter{Topic: "topic"})
		require.NoError(t, err)
		require.EqualValues(t, len(to.want), groups[0].Lag, name)
		subscriber, messages = f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 4}, "topic")
		require.Equal(t, to.want, uuids(receive(t, messages, len(to.want))), name)
		require.NoError(t, subscriber.Close())
		again, err := consumer.Groups(t.Context(), outbox.GroupFilter{Topic: "topic"})
		require.NoError(t, err)
		require.Zero(t, again[0].Lag, name)
	}

	// And the position holds on the next cluster: nothing of the others again.
	seek(t, consumer, outbox.SeekLatest(), outbox.SeekOptions{})
	f.moveToAnotherCluster(-10)
	f.exec("UPDATE outbox.cursors c SET past = (SELECT jsonb_object_agg(e.key::bigint - 10, e.value) FROM jsonb_each(c.past) e)")
	subscriber, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	require.Empty(t, f.until(t, messages))
	require.NoError(t, subscriber.Close())
}

// What a dry run says is what happens, from any position and with messages that are
// not acked: of what was acked so many come again, of the rest so many never come.
func TestSeekDoesWhatTheDryRunSaid(t *testing.T) {
	t.Parallel()

	for acked := 0; acked <= 10; acked += 5 {
		for at := 1; at <= 11; at += 2 {
			t.Run(fmt.Sprintf("%d acked, to %d", acked, at), func(t *testing.T) {
				t.Parallel()

				f := newFixture(t)
				publisher := f.publisher(outbox.PublisherConfig{})
				sent := newMessages(10)
				require.NoError(t, publisher.Publish("topic", sent...))
				f.exec("INSERT INTO outbox.messages (topic, uuid, target_group) VALUES ('topic', 'of another', 'another')")
				consumer := f.consumer(nil)
				config := outbox.SubscriberConfig{PageSize: 4, Ordering: outbox.OrderingUnordered, MaxInFlight: 3}
				subscriber, messages := f.subscribe(consumer, config, "topic")
				// The first one stays in flight.
				had := map[string]bool{}
				var first *message.Message
				for range acked {
					msg := <-messages
					if first == nil {
						first = msg
						continue
					}
					require.True(t, msg.Ack())
					had[msg.UUID] = true
				}
				if first != nil {
					first.Nack()
				}
				require.NoError(t, subscriber.Close())

				to := outbox.SeekLatest()
				if at <= 10 {
					to = outbox.SeekMessage(0, f.id(t, sent[at-1].UUID))
				}
				result := seek(t, consumer, to, outbox.SeekOptions{AllowSkip: true})
				var again, skipped int64
				for i, msg := range sent {
					switch comes := i >= at-1; {
					case comes && had[msg.UUID]:
						again++
					case !comes && !had[msg.UUID]:
						skipped++
					}
				}
				require.Equal(t, outbox.SeekResult{Again: again, Skipped: skipped, Exact: true, Holders: []string{}}, result)
				subscriber, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
				require.Equal(t, uuids(sent[min(at-1, 10):]), f.until(t, messages))
				require.NoError(t, subscriber.Close())
			})
		}
	}
}

// Messages that the group has not had are skipped only by those who say so.
func TestSeekSkipsOnlyWhenTold(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(5)
	require.NoError(t, publisher.Publish("topic", sent...))
	consumer := f.consumer(nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[:2]...)
	require.NoError(t, subscriber.Close())
	before := f.text("SELECT to_jsonb(k)::text FROM outbox.cursors k")
	result, err := consumer.Seek(t.Context(), outbox.DefaultConsumerGroup, "topic", outbox.SeekLatest(), outbox.SeekOptions{})
	require.ErrorIs(t, err, outbox.ErrWouldSkip)
	require.ErrorContains(t, err, "3: set SeekOptions.AllowSkip")
	require.EqualValues(t, 3, result.Skipped)
	require.Equal(t, before, f.text("SELECT to_jsonb(k)::text FROM outbox.cursors k"))
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.group_log"))
	// A dry run needs no permission, and changes nothing either.
	result, err = consumer.Seek(t.Context(), outbox.DefaultConsumerGroup, "topic", outbox.SeekLatest(), outbox.SeekOptions{DryRun: true})
	require.NoError(t, err)
	require.EqualValues(t, 3, result.Skipped)
	require.Equal(t, before, f.text("SELECT to_jsonb(k)::text FROM outbox.cursors k"))
	seek(t, consumer, outbox.SeekLatest(), outbox.SeekOptions{AllowSkip: true})
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	require.Empty(t, f.until(t, messages))
}

// Clocks step back, so that a message has a higher id and an older time than one
// before it: nothing that is as new as asked for is missed.
func TestSeekToATimeBetweenThoseOfIds(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	moment := time.Now().Add(-time.Hour).Truncate(time.Second)
	for i, minutes := range []int{1, 5, 2, 3, 6} {
		f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('topic', $1, $2)", fmt.Sprint(i), moment.Add(time.Duration(minutes)*time.Minute))
	}
	consumer := f.consumer(nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	receive(t, messages, 5)
	require.NoError(t, subscriber.Close())
	for minutes, want := range map[int][]string{0: {"0", "1", "2", "3", "4"}, 2: {"1", "2", "3", "4"}, 4: {"1", "2", "3", "4"}, 6: {"4"}, 7: {}} {
		seek(t, consumer, outbox.SeekTime(moment.Add(time.Duration(minutes)*time.Minute)), outbox.SeekOptions{AllowSkip: true})
		subscriber, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		require.Equal(t, want, uuids(receive(t, messages, len(want))), "%d minutes", minutes)
		require.NoError(t, subscriber.Close())
	}
}

// A position in many topics is moved in all of them.
func TestSeekOfManyTopics(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(12)
	for i, msg := range sent {
		require.NoError(t, publisher.Publish([]string{"a.1", "a.2", "b"}[i%3], msg))
	}
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	batches, err := subscriber.SubscribeBatches(t.Context(), outbox.MatchTopics("a.*"), 5)
	require.NoError(t, err)
	next := func(n int) []string {
		var got []string
		for len(got) < n {
			select {
			case batch := <-batches:
				got = append(got, uuids(batch)...)
				for _, msg := range batch {
					msg.Ack()
				}
			case <-time.After(waitFor):
				require.FailNow(t, "messages missing", "%d of %d", len(got), n)
			}
		}
		return got
	}
	ofA := func(list []*message.Message) []string {
		return slices.DeleteFunc(uuids(list), func(uuid string) bool {
			return f.number("SELECT count(*)::int FROM outbox.messages WHERE uuid = $1 AND topic = 'b'", uuid) > 0
		})
	}
	require.Equal(t, ofA(sent), next(8))
	for _, at := range []int{4, 0} {
		require.Eventually(t, func() bool {
			result, err := consumer.SeekBatches(t.Context(), outbox.DefaultConsumerGroup, outbox.SeekMessage(0, f.id(t, sent[at].UUID)), outbox.SeekOptions{DryRun: true})
			return err == nil && result.Skipped == 0 && result.Exact && int(result.Again) == len(ofA(sent[at:]))
		}, waitFor, 5*time.Millisecond, "the last acks are stored, and counted")
		_, err := consumer.SeekBatches(t.Context(), outbox.DefaultConsumerGroup, outbox.SeekMessage(0, f.id(t, sent[at].UUID)), outbox.SeekOptions{})
		require.NoError(t, err)
		require.Equal(t, ofA(sent[at:]), next(len(ofA(sent[at:]))))
	}
	groups, err := consumer.Groups(t.Context(), outbox.GroupFilter{})
	require.NoError(t, err)
	require.Len(t, groups, 1)
	require.Equal(t, []string{`a.%`}, groups[0].Patterns)
	_, err = consumer.Seek(t.Context(), outbox.DefaultConsumerGroup, "a.1", outbox.SeekEarliest(), outbox.SeekOptions{})
	require.ErrorIs(t, err, outbox.ErrUnknownGroup)
}

// Retries wait to be delivered again: they stay, or go if that is asked for.
func TestSeekAndRetries(t *testing.T) {
	t.Parallel()

	for _, drop := range []bool{true, false} {
		t.Run(fmt.Sprint("dropped ", drop), func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			consumer := f.consumer(nil)
			subscriber, _ := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			require.NoError(t, subscriber.Close())
			f.exec(`INSERT INTO outbox.deferred (due_at, topic, uuid, target_group) VALUES (now() + interval '1 hour', 'topic', 'mine', $1),
				(now() + interval '1 hour', 'topic', 'of another', 'other'), (now() + interval '1 hour', 'topic', 'scheduled', NULL),
				(now() + interval '1 hour', 'another', 'elsewhere', $1)`, outbox.DefaultConsumerGroup)
			require.EqualValues(t, 1, seek(t, consumer, outbox.SeekEarliest(), outbox.SeekOptions{DropRetries: drop}).Retries)
			left := "elsewhere, mine, of another, scheduled"
			if drop {
				left = "elsewhere, of another, scheduled"
			}
			require.Equal(t, left, f.text("SELECT string_agg(uuid, ', ' ORDER BY uuid) FROM outbox.deferred"))
		})
	}
}

// What cannot be is refused before any SQL runs (the context has ended), and names
// what is wrong; what only the database knows is refused without a change.
func TestSeekRefusals(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(3)...))
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "group"}, "topic")
	receive(t, messages, 3)
	require.NoError(t, subscriber.Close())
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for want, c := range map[string]struct {
		group, topic string
		to           outbox.SeekTo
		options      outbox.SeekOptions
	}{
		"group is empty":               {"", "topic", outbox.SeekEarliest(), outbox.SeekOptions{}},
		"outbox: group has 1025":       {strings.Repeat("g", outbox.MaxConsumerGroupBytes+1), "topic", outbox.SeekEarliest(), outbox.SeekOptions{}},
		"topic":                        {"group", "", outbox.SeekEarliest(), outbox.SeekOptions{}},
		"SeekTo is empty":              {"group", "topic", outbox.SeekTo{}, outbox.SeekOptions{}},
		"id must be at least 1, is 0":  {"group", "topic", outbox.SeekMessage(0, 0), outbox.SeekOptions{}},
		"id must be at least 1, is -4": {"group", "topic", outbox.SeekMessage(0, -4), outbox.SeekOptions{}},
		"era must not be negative":     {"group", "topic", outbox.SeekMessage(-1, 1), outbox.SeekOptions{}},
		"time is zero":                 {"group", "topic", outbox.SeekTime(time.Time{}), outbox.SeekOptions{}},
		"in the future":                {"group", "topic", outbox.SeekTime(time.Now().Add(time.Hour)), outbox.SeekOptions{}},
		"before the year 1":            {"group", "topic", outbox.SeekTime(time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC)), outbox.SeekOptions{}},
		"SeekOptions.Actor":            {"group", "topic", outbox.SeekEarliest(), outbox.SeekOptions{Actor: "\x00"}},
		"SeekOptions.Reason":           {"group", "topic", outbox.SeekEarliest(), outbox.SeekOptions{Reason: "\xff"}},
	} {
		_, err := consumer.Seek(ended, c.group, c.topic, c.to, c.options)
		require.ErrorContains(t, err, want)
		require.NotErrorIs(t, err, context.Canceled, want)
	}

	before := f.text("SELECT to_jsonb(k)::text FROM outbox.cursors k")
	for _, dry := range []bool{true, false} {
		options := outbox.SeekOptions{DryRun: dry, AllowSkip: true}
		_, err := consumer.Seek(t.Context(), "nobody", "topic", outbox.SeekEarliest(), options)
		require.ErrorIs(t, err, outbox.ErrUnknownGroup)
		_, err = consumer.Seek(t.Context(), "group", "other", outbox.SeekEarliest(), options)
		require.ErrorIs(t, err, outbox.ErrUnknownGroup)
		_, err = consumer.SeekBatches(t.Context(), "group", outbox.SeekEarliest(), options)
		require.ErrorIs(t, err, outbox.ErrUnknownGroup)
		_, err = consumer.Seek(t.Context(), "group", "topic", outbox.SeekMessage(0, 1<<62), options)
		require.ErrorIs(t, err, outbox.ErrNoSuchPosition)
		require.ErrorContains(t, err, "the last one drawn is 3")
		_, err = consumer.Seek(t.Context(), "group", "topic", outbox.SeekMessage(0, 5), options)
		require.ErrorIs(t, err, outbox.ErrNoSuchPosition)
		_, err = consumer.Seek(t.Context(), "group", "topic", outbox.SeekMessage(17, 1), options)
		require.ErrorIs(t, err, outbox.ErrNoSuchPosition)
		require.ErrorContains(t, err, "era 17")
		require.Equal(t, before, f.text("SELECT to_jsonb(k)::text FROM outbox.cursors k"))
	}
	// The next id that will be drawn is where the latest is.
	seek4, err := consumer.Seek(t.Context(), "group", "topic", outbox.SeekMessage(0, 4), outbox.SeekOptions{})
	require.NoError(t, err)
	require.Zero(t, seek4.Again)
}

// A process has the cursor of an earlier number of shards, and a message of it, when
// the group is moved. Others must not begin with its successors before it has
// stopped: two would have messages of one key at once.
func TestSeekLetsWhoeverEndsAShardStopFirst(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := keyed(9)
	require.NoError(t, publisher.Publish("topic", sent...))
	first := f.consumer(nil)
	subscriber, messages := f.subscribe(first, outbox.SubscriberConfig{PageSize: 2}, "topic")
	requireNext(t, messages, sent[:3]...)
	require.NoError(t, subscriber.Close())
	require.NoError(t, first.Reshard(t.Context(), "", "topic", 2))
	_, messages = f.subscribe(first, outbox.SubscriberConfig{PageSize: 2}, "topic")
	handled := nextMessage(t, messages)
	require.Equal(t, sent[3].UUID, handled.UUID)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors WHERE until IS NOT NULL AND holder IS NOT NULL"))

	second := f.consumer(nil)
	_, others := f.subscribe(second, outbox.SubscriberConfig{PageSize: 2}, "topic")
	seek(t, second, outbox.SeekEarliest(), outbox.SeekOptions{})
	await(t, handled.Context().Done())
	select {
	case msg := <-others:
		require.FailNow(t, "another process has begun", msg.UUID)
	default:
	}
	require.Equal(t, 0, f.number("SELECT count(*)::int FROM outbox.cursors WHERE until IS NULL AND holder IS NOT NULL"))
	handled.Ack()
	// All comes again, each key in its order; from either process.
	got := map[string]int{}
	last := map[string]int{}
	for len(got) < len(sent) {
		var msg *message.Message
		select {
		case msg = <-messages:
		case msg = <-others:
		case <-time.After(waitFor):
			require.FailNow(t, "messages missing", "%d", len(got))
		}
		require.True(t, msg.Ack())
		n, key := indexOf(sent, msg.UUID), msg.Metadata.Get(outbox.DefaultKeyMetadata)
		require.GreaterOrEqual(t, n, last[key], "order of %s", key)
		last[key] = n
		got[msg.UUID]++
	}
	for uuid, n := range got {
		require.Equal(t, 1, n, uuid)
	}
}
