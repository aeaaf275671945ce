package tests

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// A dump is restored into a new cluster, whose transaction ids begin again. A
// position that is a number of the old one finds nothing there, for years; all
// that was not delivered must arrive, and nothing else again. Field case F04.
func TestRestoreIntoAnotherCluster(t *testing.T) {
	t.Parallel()

	for format, restore := range dumpFormats {
		t.Run(format, func(t *testing.T) {
			t.Parallel()

			old, _ := newOwnFixture(t, dumping)
			packed := old.pack()
			moved := emptyCluster(t, dumping)
			restore(old, moved)
			require.NotEqual(t, old.era(t), moved.era(t))
			lacks := []string{}
			if format == "one schema" { // which no publication belongs to
				lacks = []string{"live publication " + quoteIdentifier(oddSchema)}
			}
			require.Equal(t, lacks, kinds(moved.check(moved.pool)))
			moved.unpack(packed)
		})
	}
}

// The dump is taken while messages are published and delivered. What it holds
// and its positions are of one moment, so all that was published by then is
// delivered on one side or the other.
func TestRestoreWhatWasDumpedUnderLoad(t *testing.T) {
	t.Parallel()

	for format, restore := range dumpFormats {
		t.Run(format, func(t *testing.T) {
			t.Parallel()

			old, _ := newOwnFixture(t, dumping)
			publisher := old.publisher(outbox.PublisherConfig{})
			consumer := old.consumer(nil)
			_, messages := old.subscribe(consumer, outbox.SubscriberConfig{PageSize: 5, Ordering: outbox.OrderingByKey, MaxInFlight: 3}, "topic")
			var mu sync.Mutex
			acked := map[string]bool{}
			half := make(chan struct{})
			var running sync.WaitGroup
			stop := make(chan struct{})
			running.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					case msg, open := <-messages:
						if !open {
							return
						}
						mu.Lock()
						acked[msg.UUID] = true
						mu.Unlock()
						msg.Ack()
					}
					if n == 50 {
						close(half)
					}
				}
			})
			var publishErr error
			running.Go(func() {
				for publishErr == nil {
					select {
					case <-stop:
						return
					default:
						publishErr = publisher.Publish("topic", keyed(3)...)
					}
				}
			})
			await(t, half)
			moved := emptyCluster(t, dumping)
			restore(old, moved)
			close(stop)
			running.Wait()
			require.NoError(t, publishErr)
			require.NoError(t, consumer.Close())

			// What the restored position says was handed out was acked there.
			var undelivered []string
			want := map[string]bool{}
			rows, err := moved.pool.Query(t.Context(), moved.sql("SELECT uuid FROM outbox.messages ORDER BY id"))
			require.NoError(t, err)
			for rows.Next() {
				var uuid string
				require.NoError(t, rows.Scan(&uuid))
				want[uuid] = true
				if !acked[uuid] {
					undelivered = append(undelivered, uuid)
				}
			}
			require.NoError(t, rows.Err())
			require.Greater(t, len(want), 50)
			t.Logf("%d messages restored, %d of them delivered before", len(want), len(want)-len(undelivered))

			end := newMessages(1)
			require.NoError(t, moved.publisher(outbox.PublisherConfig{}).Publish("topic", end...))
			_, messages = moved.subscribe(moved.consumer(nil), outbox.SubscriberConfig{}, "topic")
			received := map[string]bool{}
			for {
				msg := nextMessage(t, messages)
				require.True(t, msg.Ack())
				if msg.UUID == end[0].UUID {
					break
				}
				require.True(t, want[msg.UUID])
				require.False(t, received[msg.UUID], "twice")
				received[msg.UUID] = true
			}
			for _, uuid := range undelivered {
				require.True(t, received[uuid], "lost")
			}
		})
	}
}

// The outbox moves from cluster to cluster. What was written on the first one and
// delivered on the second does not come again on the third, whose positions know
// where the first was left, and that says nothing of it; nor do the rows of a
// cluster that a group has never seen but as the past.
func TestRestoreAgainAndAgain(t *testing.T) {
	t.Parallel()

	at, _ := newOwnFixture(t, dumping)
	var rest, all []*message.Message
	for move := range 3 {
		if move > 0 {
			next := emptyCluster(t, dumping)
			dumpFormats["custom"](at, next)
			at = next
		}
		sent := keyed(12)
		require.NoError(t, at.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
		all = append(all, sent...)
		consumer := at.consumer(nil)
		_, messages := at.subscribe(consumer, outbox.SubscriberConfig{PageSize: 4}, "topic")
		requireNext(t, messages, append(rest, sent[:6]...)...)
		rest = slices.Clone(sent[6:])
		if move == 1 {
			_, messages = at.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "from the second on", PageSize: 5}, "topic")
			requireNext(t, messages, all...)
		}
		require.NoError(t, consumer.Close())
	}
	consumer := at.consumer(nil)
	_, messages := at.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, rest...)
	_, messages = at.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "from the second on"}, "topic")
	requireNext(t, messages, all[24:]...)
}

// The outbox moves on, and then back to the cluster where it was at first, whose
// transaction ids go on. The position there is the one of the departure, so what
// was not delivered by then comes again, and nothing is lost; whatever became of
// the group on the way, such as another number of shards.
func TestRestoreThereAndBack(t *testing.T) {
	t.Parallel()

	for _, shards := range []int{1, 2} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			t.Parallel()

			first, server := newOwnFixture(t, dumping)
			second := emptyCluster(t, dumping)
			back := &fixture{t: t, url: pgtest.DatabaseOn(t, server)}
			back.pool = pgtest.Pool(t, back.url)
			restore := dumpFormats["custom"]

			sent := keyed(18)
			require.NoError(t, first.publisher(outbox.PublisherConfig{}).Publish("topic", sent[:3]...))
			consumer := first.consumer(nil)
			_, messages := first.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			requireNext(t, messages, sent[:3]...)
			require.NoError(t, consumer.Close())
			require.NoError(t, first.publisher(outbox.PublisherConfig{}).Publish("topic", sent[3:6]...))

			restore(first, second)
			require.NoError(t, second.publisher(outbox.PublisherConfig{}).Publish("topic", sent[6:12]...))
			consumer = second.consumer(nil)
			subscriber, messages := second.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			requireNext(t, messages, sent[3:9]...)
			require.NoError(t, subscriber.Close())
			delivered := 9
			if shards > 1 {
				require.NoError(t, consumer.Reshard(t.Context(), "", "topic", shards))
				_, messages = second.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
				second.requireAll(messages, "topic", sent[9:12]...)
				delivered = 12
			}
			require.NoError(t, consumer.Close())

			restore(second, back)
			require.Equal(t, first.era(t), back.era(t))
			require.NoError(t, back.publisher(outbox.PublisherConfig{}).Publish("topic", sent[12:]...))
			_, messages = back.subscribe(back.consumer(nil), outbox.SubscriberConfig{}, "topic")
			again := 3 // those that were not delivered when it was left
			if shards > 1 {
				again = 6 // all that was written there
			}
			want := slices.Concat(sent[delivered:], sent[6-again:6])
			require.ElementsMatch(t, numbersOf(sent, want), numbersOf(sent, receive(t, messages, len(want))))
			back.requireAll(messages, "topic")
		})
	}
}

// A dump is restored beside the original, in another database of the same
// cluster: it brings the row that marks the life of the server, and the era, the
// transaction ids and their visibility are the same. The copy goes on from the
// dump, and neither has anything to do with the other.
func TestRestoreBesideTheOriginal(t *testing.T) {
	t.Parallel()

	for format, restore := range dumpFormats {
		t.Run(format, func(t *testing.T) {
			t.Parallel()

			original, server := newOwnFixture(t, dumping)
			packed := original.pack()
			duplicate := &fixture{t: t, url: pgtest.DatabaseOn(t, server)}
			duplicate.pool = pgtest.Pool(t, duplicate.url)
			restore(original, duplicate)
			require.Equal(t, original.era(t), duplicate.era(t))
			original.unpack(packed)
			duplicate.unpack(packed)
		})
	}
}

// numbersOf returns which of the messages sent these are.
func numbersOf(sent, messages []*message.Message) []int {
	numbers := make([]int, len(messages))
	for i, msg := range messages {
		numbers[i] = indexOf(sent, msg.UUID)
	}
	return numbers
}

// The number of shards was changed on a cluster that the outbox had been moved to,
// and then it moves on. To the new shards the first cluster's rows are done, and
// that is written as a snapshot that the server must be able to read.
func TestRestoreAfterReshard(t *testing.T) {
	t.Parallel()

	first, _ := newOwnFixture(t, dumping)
	sent := keyed(18)
	require.NoError(t, first.publisher(outbox.PublisherConfig{}).Publish("topic", sent[:6]...))
	consumer := first.consumer(nil)
	_, messages := first.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[:3]...)
	require.NoError(t, consumer.Close())

	second := emptyCluster(t, dumping)
	dumpFormats["custom"](first, second)
	require.NoError(t, second.publisher(outbox.PublisherConfig{}).Publish("topic", sent[6:12]...))
	consumer = second.consumer(nil)
	_, messages = second.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[3:9]...)
	require.NoError(t, consumer.Reshard(t.Context(), "", "topic", 2))
	second.requireAll(messages, "topic", sent[9:12]...)
	require.Eventually(t, func() bool { return second.number("SELECT count(*) FROM outbox.cursors WHERE shards = 2") == 2 },
		waitFor, 10*time.Millisecond)
	require.NoError(t, consumer.Close())

	third := emptyCluster(t, dumping)
	dumpFormats["custom"](second, third)
	require.NoError(t, third.publisher(outbox.PublisherConfig{}).Publish("topic", sent[12:]...))
	_, messages = third.subscribe(third.consumer(nil), outbox.SubscriberConfig{}, "topic")
	third.requireAll(messages, "topic", sent[12:]...)
}
