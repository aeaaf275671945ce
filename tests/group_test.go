package tests

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

// tally counts deliveries by UUID. Safe for concurrent use.
type tally struct {
	mu    sync.Mutex
	count map[string]int
	total int
	// full is closed at the given total.
	full chan struct{}
	want int
}

func newTally(want int) *tally {
	return &tally{count: map[string]int{}, full: make(chan struct{}), want: want}
}

func (c *tally) add(msg *message.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count[msg.UUID]++
	if c.total++; c.total == c.want {
		close(c.full)
	}
}

// requireOnce fails unless each of the messages was delivered, and once.
func (c *tally) requireOnce(t testing.TB, sent []*message.Message) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, msg := range sent {
		require.Equal(t, 1, c.count[msg.UUID], "message %d", i)
	}
	require.Equal(t, len(sent), c.total, "nothing else was delivered")
}

// With a database whose default isolation is serializable, readers that claim
// rows in transactions of their own fail on each other (40001): they flood the
// log, hand out twice after the rollback, or stop. Six subscribers of one group,
// each of which leaves after a while so that the topic goes through many hands,
// handle each message once and find nothing to complain about. Field case F13.
func TestGroupUnderSerializableDefault(t *testing.T) {
	t.Parallel()

	const subscribers, total, each = 6, 2000, 350
	f := newFixture(t)
	f.exec(`DO $do$ BEGIN
		EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable', current_database());
	END $do$`)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(total)
	counted := newTally(total)
	books := make([]*logBook, subscribers/2)
	var consumers []*outbox.Consumer
	for i := range books {
		consumer, book := f.loggedConsumer(f.pool.Config(), nil)
		consumers, books[i] = append(consumers, consumer), book
	}
	var wg sync.WaitGroup
	for i := range subscribers {
		subscriber, messages := f.subscribe(consumers[i/2], outbox.SubscriberConfig{PageSize: 40}, "topic")
		wg.Go(func() {
			n := 0
			for msg := range messages {
				counted.add(msg)
				msg.Ack()
				if n++; n == each {
					assert.NoError(t, subscriber.Close())
				}
			}
		})
	}
	for i := 0; i < total; i += 10 {
		require.NoError(t, publisher.Publish("topic", sent[i:i+10]...))
	}
	await(t, counted.full)
	for i, consumer := range consumers {
		require.NoError(t, consumer.Close())
		require.Empty(t, books[i].errors())
	}
	wg.Wait()
	counted.requireOnce(t, sent)
}

// The first readers of a new group, all at the same moment: where no row exists
// yet that they could lock, two of them read the same range. Field case F91.
func TestFirstSubscribersOfANewGroup(t *testing.T) {
	t.Parallel()

	const rounds, subscribers, total = 10, 8, 1000
	f := newFixture(t)
	sent := newMessages(total)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	consumers := []*outbox.Consumer{f.consumer(nil), f.consumer(nil)}
	for round := range rounds {
		counted := newTally(total)
		start := make(chan struct{})
		var starting, receiving sync.WaitGroup
		all := make([]*outbox.Subscriber, subscribers)
		for i := range all {
			subscriber, err := outbox.NewSubscriber(consumers[i%2], outbox.SubscriberConfig{
				ConsumerGroup: fmt.Sprintf("group %d", round), PageSize: 100,
			}, nil)
			require.NoError(t, err)
			all[i] = subscriber
			starting.Go(func() {
				<-start
				messages, err := subscriber.Subscribe(context.Background(), "topic")
				if !assert.NoError(t, err) {
					return
				}
				receiving.Go(func() {
					for msg := range messages {
						counted.add(msg)
						msg.Ack()
					}
				})
			})
		}
		close(start)
		starting.Wait()
		await(t, counted.full)
		for _, subscriber := range all {
			require.NoError(t, subscriber.Close())
		}
		receiving.Wait()
		counted.requireOnce(t, sent)
	}
}

// Groups do not take each other's messages, whether they read at the same time
// or one long after the other, and whatever their names are like.
func TestEachGroupGetsEverything(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(40)
	consumer := f.consumer(nil)
	groups := []string{
		"", "a", "A", " a", "a ", `"; DROP SCHEMA outbox; --`, "groß/écran", "\U0001F4EE",
		strings.Repeat("g", 300), strings.Repeat("ü", outbox.MaxConsumerGroupBytes/2),
	}
	var channels []<-chan *message.Message
	for _, group := range groups {
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: group, PageSize: 7}, "topic")
		channels = append(channels, messages)
	}
	require.NoError(t, publisher.Publish("topic", sent...))
	for i, messages := range channels {
		for j, msg := range sent {
			got := nextMessage(t, messages)
			require.Equal(t, msg.UUID, got.UUID, "group %.20q, message %d", groups[i], j)
			delivery, ok := outbox.DeliveryFromCtx(got.Context())
			require.True(t, ok)
			want := groups[i]
			if want == "" {
				want = outbox.DefaultConsumerGroup
			}
			require.Equal(t, want, delivery.ConsumerGroup)
			require.True(t, got.Ack())
		}
	}
	require.Equal(t, len(groups), f.number("SELECT count(*)::int FROM outbox.cursors"))
}

// The longest names of both kinds stand in one index together.
func TestLongestGroupAndTopic(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	// Nothing in them repeats, or the index would compress them.
	group := randomText(outbox.MaxConsumerGroupBytes)
	topic := randomText(outbox.MaxTopicBytes)
	sent := newMessages(3)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish(topic, sent...))
	consumer := f.consumer(nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: group}, topic)
	requireNext(t, messages, sent...)
}

// A message may be meant for one group alone: a retry of what only that group
// failed at. A condition for that which is joined to the others without brackets
// brings acked messages back. Field case F90.
func TestMessagesForOneGroup(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	insert := func(db interface{ exec(string, ...any) }, uuid string, group *string) {
		db.exec("INSERT INTO outbox.messages (topic, uuid, target_group, attempt) VALUES ('topic', $1, $2, 3)", uuid, group)
	}
	a, b := "a", "b"
	subscribe := func(group string) (*outbox.Subscriber, <-chan *message.Message) {
		return f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: group, PageSize: 2}, "topic")
	}
	want := map[string][]string{}
	for i := range 10 {
		all, one, other := fmt.Sprintf("all %d", i), fmt.Sprintf("a %d", i), fmt.Sprintf("b %d", i)
		insert(f, all, nil)
		insert(f, one, &a)
		insert(f, other, &b)
		want["a"] = append(want["a"], all, one)
		want["b"] = append(want["b"], all, other)
		want["c"] = append(want["c"], all)
	}
	for group, uuids := range want {
		subscriber, messages := subscribe(group)
		for _, uuid := range uuids {
			msg := nextMessage(t, messages)
			require.Equal(t, uuid, msg.UUID, "group %s", group)
			delivery, ok := outbox.DeliveryFromCtx(msg.Context())
			require.True(t, ok)
			require.Equal(t, 4, delivery.Attempt, "the row counts three already")
			require.True(t, msg.Ack())
		}
		require.NoError(t, subscriber.Close())
	}

	// Nothing of it comes back, to those who go on from there.
	late := &lateTransaction{f: f, t: t}
	late.begin()
	insert(late, "late for a", &a)
	insert(late, "late for all", nil)
	insert(f, "last", nil)
	for group := range want {
		subscriber, messages := subscribe(group)
		require.Equal(t, "last", receive(t, messages, 1)[0].UUID)
		require.NoError(t, subscriber.Close())
	}
	late.commit()
	want = map[string][]string{"a": {"late for a", "late for all"}, "b": {"late for all"}, "c": {"late for all"}}
	insert(f, "end", nil)
	for group, late := range want {
		_, messages := subscribe(group)
		for _, uuid := range append(late, "end") {
			require.Equal(t, uuid, receive(t, messages, 1)[0].UUID, "group %s", group)
		}
	}
}

// Two outboxes in one database, with the same topic and group: names that belong
// to the whole database would let them talk to each other, and the end of one
// would be the end of both. Field case F98.
func TestTwoOutboxesInOneDatabase(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	names := []string{oddSchema, "other outbox"}
	require.NoError(t, schema.Migrate(t.Context(), f.pool, schema.Config{Name: names[1]}))
	var publishers []*outbox.Publisher
	var consumers []*outbox.Consumer
	var channels []<-chan *message.Message
	for _, name := range names {
		publisher, err := outbox.NewPublisher(f.pool, outbox.PublisherConfig{Schema: name}, nil)
		require.NoError(t, err)
		consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Schema = name })
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		publishers, consumers, channels = append(publishers, publisher), append(consumers, consumer), append(channels, messages)
	}
	sent := [][]*message.Message{newMessages(30), newMessages(30)}
	for i := range 15 {
		for j := range names {
			require.NoError(t, publishers[j].Publish("topic", sent[j][2*i], sent[j][2*i+1]))
		}
	}
	for j := range names {
		requireNext(t, channels[j], sent[j]...)
	}

	// One goes, the other stays.
	require.NoError(t, consumers[0].Close())
	f.exec("DROP SCHEMA outbox CASCADE")
	last := newMessages(1)
	require.NoError(t, publishers[1].Publish("topic", last...))
	requireNext(t, channels[1], last...)
}

// randomText returns n bytes that a compressor can do little about.
func randomText(n int) string {
	var b strings.Builder
	for b.Len() < n {
		b.WriteString(rand.Text())
	}
	return b.String()[:n]
}
