package tests

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// programPath is one of the programs that the fixture's server belongs to.
func (f *fixture) programPath(name string) string {
	f.t.Helper()
	return filepath.Join(f.text("SELECT setting FROM pg_catalog.pg_config WHERE name = 'BINDIR'"), name)
}

// runProgram runs one of the server's programs and returns what it printed.
func (f *fixture) runProgram(name string, args ...string) string {
	f.t.Helper()
	var output, complaints bytes.Buffer
	cmd := exec.CommandContext(f.t.Context(), f.programPath(name), args...)
	cmd.Stdout, cmd.Stderr = &output, &complaints
	require.NoError(f.t, cmd.Run(), "%s %s: %s", name, strings.Join(args, " "), complaints.String())
	return output.String()
}

// dumping is of servers that can be dumped and restored by programs beside them.
var dumping = pgtest.Options{Programs: []string{"pg_dump", "pg_restore", "psql"}}

// dumpFormats are the ways in which a database is dumped and restored.
var dumpFormats = map[string]func(from, to *fixture){
	"plain SQL": func(from, to *fixture) {
		file := filepath.Join(from.t.TempDir(), "dump.sql")
		from.runProgram("pg_dump", "--dbname="+from.url, "--file="+file)
		to.runProgram("psql", "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", "--dbname="+to.url, "--file="+file)
	},
	"custom": func(from, to *fixture) {
		file := filepath.Join(from.t.TempDir(), "dump")
		from.runProgram("pg_dump", "--format=custom", "--dbname="+from.url, "--file="+file)
		to.runProgram("pg_restore", "--exit-on-error", "--jobs=2", "--dbname="+to.url, file)
	},
	"one schema": func(from, to *fixture) {
		file := filepath.Join(from.t.TempDir(), "dump")
		pattern := `"` + strings.ReplaceAll(oddSchema, `"`, `""`) + `"`
		from.runProgram("pg_dump", "--format=custom", "--no-owner", "--schema="+pattern, "--dbname="+from.url, "--file="+file)
		to.runProgram("pg_restore", "--exit-on-error", "--no-owner", "--dbname="+to.url, file)
	},
}

// emptyCluster is the empty database of another cluster.
func emptyCluster(t *testing.T, options pgtest.Options) *fixture {
	t.Helper()
	server := pgtest.Own(t, options)
	return &fixture{t: t, url: server.URL(), pool: pgtest.Pool(t, server.URL())}
}

// luggage is what an outbox held when it was moved: groups in every state that a
// group can be in, and messages that nobody has read.
type luggage struct {
	sent      []*message.Message // to orders, of which the groups have had some
	unread    []*message.Message // to unread, before anybody read it
	scheduled []*message.Message // to later
	deadID    int64
}

// keyed returns n messages that number themselves and belong to three keys.
func keyed(n int) []*message.Message {
	messages := newMessages(n)
	for i, msg := range messages {
		msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint("key ", i%3))
	}
	return messages
}

// What the groups of pack do, so that those of unpack go on the same way.
var (
	strictly = outbox.SubscriberConfig{ConsumerGroup: "strict", PageSize: 4}
	withGaps = outbox.SubscriberConfig{ConsumerGroup: "gaps", Ordering: outbox.OrderingUnordered, MaxInFlight: 8, CloseTimeout: -1}
	deferrer = outbox.SubscriberConfig{ConsumerGroup: "deferrer", Retry: outbox.RetryConfig{
		Mode: outbox.RetryDeferred, MaxAttempts: 3, MinBackoff: time.Hour, MaxBackoff: time.Hour,
	}}
	burier = outbox.SubscriberConfig{ConsumerGroup: "burier", Retry: quick(1)}
)

// pack brings an outbox into every state that a move may find it in. Nobody
// reads it when it returns.
func (f *fixture) pack() luggage {
	f.t.Helper()
	publisher := f.publisher(outbox.PublisherConfig{})
	l := luggage{sent: keyed(30), unread: keyed(7), scheduled: []*message.Message{dueIn(time.Hour), dueIn(2 * time.Hour)}}
	// A transaction that begins early and commits last: no position sees it.
	late := &lateTransaction{f: f, t: f.t}
	late.begin()
	late.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('orders', 'late')")
	require.NoError(f.t, publisher.Publish("orders", l.sent[:20]...))
	require.NoError(f.t, publisher.Publish("unread", l.unread...))
	require.NoError(f.t, publisher.Publish("later", l.scheduled...))

	consumer := f.consumer(nil)
	// In the middle of a window, on its third page.
	subscriber, messages := f.subscribe(consumer, strictly, "orders")
	requireNext(f.t, messages, l.sent[:10]...)
	require.NoError(f.t, subscriber.Close())
	// Two in flight that nobody ever acked.
	subscriber, messages = f.subscribe(consumer, withGaps, "orders")
	taken := inFlight(f.t, messages, 8)
	for i, msg := range l.sent[:8] {
		if i != 2 && i != 5 {
			require.True(f.t, taken[msg.UUID].Ack())
		}
	}
	require.NoError(f.t, subscriber.Close())
	// One that is to be tried again in an hour.
	subscriber, messages = f.subscribe(consumer, deferrer, "orders")
	require.True(f.t, nextMessage(f.t, messages).Nack())
	requireNext(f.t, messages, l.sent[1:20]...)
	require.NoError(f.t, subscriber.Close())
	// One that died.
	subscriber, messages = f.subscribe(consumer, burier, "orders")
	require.True(f.t, nextMessage(f.t, messages).Nack())
	requireNext(f.t, messages, l.sent[1:20]...)
	require.NoError(f.t, subscriber.Close())
	require.NoError(f.t, consumer.Close())
	l.deadID = int64(f.number("SELECT id FROM outbox.dead_letters"))
	// More, if the position moved on over what was not handed out yet.
	require.GreaterOrEqual(f.t, f.number("SELECT jsonb_array_length(holes) FROM outbox.cursors WHERE consumer_group = 'gaps'"), 2)
	require.Equal(f.t, 3, f.number("SELECT count(*) FROM outbox.deferred"))
	require.Equal(f.t, "main", f.text("SELECT step FROM outbox.cursors WHERE consumer_group = 'strict'"), "one group is in the middle of a window")

	require.NoError(f.t, publisher.Publish("orders", l.sent[20:]...))
	late.commit()
	return l
}

// requireAll receives what is wanted, all of it once, each key in its order, and
// then a message that is published now: nothing else comes before it.
func (f *fixture) requireAll(messages <-chan *message.Message, topic string, want ...*message.Message) {
	f.t.Helper()
	received := receive(f.t, messages, len(want))
	require.ElementsMatch(f.t, uuids(want), uuids(received))
	place := map[string]int{}
	for i, msg := range want {
		place[msg.UUID] = i
	}
	last := map[string]int{}
	for _, msg := range received {
		if key := msg.Metadata.Get(outbox.DefaultKeyMetadata); key != "" {
			require.GreaterOrEqual(f.t, place[msg.UUID], last[key], "order of %s", key)
			last[key] = place[msg.UUID]
		}
	}
	end := newMessages(1)
	require.NoError(f.t, f.publisher(outbox.PublisherConfig{}).Publish(topic, end...))
	requireNext(f.t, messages, end...)
}

// unpack fails unless everything that was moved and not delivered arrives, once,
// before what is new, and nothing else.
func (f *fixture) unpack(l luggage) {
	f.t.Helper()
	publisher := f.publisher(outbox.PublisherConfig{})
	fresh := keyed(12)
	require.NoError(f.t, publisher.Publish("orders", fresh...))
	moreUnread, moreScheduled := keyed(3), []*message.Message{dueIn(time.Hour)}
	require.NoError(f.t, publisher.Publish("unread", moreUnread...))
	require.NoError(f.t, publisher.Publish("later", moreScheduled...))
	late := message.NewMessage("late", nil)
	with := func(old ...*message.Message) []*message.Message { return append(append(old, late), fresh...) }

	consumer := f.consumer(nil)
	check := func(config outbox.SubscriberConfig, want ...*message.Message) {
		f.t.Helper()
		subscriber, messages := f.subscribe(consumer, config, "orders")
		defer func() { require.NoError(f.t, subscriber.Close()) }()
		received := receive(f.t, messages, len(want))
		require.ElementsMatch(f.t, uuids(want), uuids(received), config.ConsumerGroup)
		last := map[string]int{}
		for _, msg := range received {
			at := indexOf(want, msg.UUID)
			if key := msg.Metadata.Get(outbox.DefaultKeyMetadata); key != "" && config.Ordering != outbox.OrderingUnordered {
				require.GreaterOrEqual(f.t, at, last[key], "group %s, order of %s", config.ConsumerGroup, key)
				last[key] = at
			}
		}
	}
	check(strictly, with(append([]*message.Message{}, l.sent[10:]...)...)...)
	check(withGaps, with(append([]*message.Message{l.sent[2], l.sent[5]}, l.sent[8:]...)...)...)
	check(deferrer, with(append([]*message.Message{}, l.sent[20:]...)...)...)
	check(burier, with(append([]*message.Message{}, l.sent[20:]...)...)...)
	f.exec("UPDATE outbox.deferred SET due_at = now() WHERE target_group = 'deferrer'")
	subscriber, messages := f.subscribe(consumer, deferrer, "orders")
	retried := nextMessage(f.t, messages)
	require.Equal(f.t, l.sent[0].UUID, retried.UUID)
	require.Equal(f.t, 2, attemptOf(f.t, retried))
	require.True(f.t, retried.Ack())
	require.NoError(f.t, subscriber.Close())

	letters := f.deadLetters(nil)
	dead, err := letters.Get(f.t.Context(), l.deadID)
	require.NoError(f.t, err)
	require.Equal(f.t, l.sent[0].UUID, dead.UUID)
	require.NoError(f.t, letters.Requeue(f.t.Context(), l.deadID, ""))
	_, messages = f.subscribe(consumer, burier, "orders")
	requireNext(f.t, messages, l.sent[0])

	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "unread")
	f.requireAll(messages, "unread", append(append([]*message.Message{}, l.unread...), moreUnread...)...)
	f.exec("UPDATE outbox.deferred SET due_at = now()")
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "later")
	f.requireAll(messages, "later", append(append([]*message.Message{}, l.scheduled...), moreScheduled...)...)

	// Nothing of it is left over: each group has its end next.
	end := newMessages(1)
	require.NoError(f.t, publisher.Publish("orders", end...))
	for _, config := range []outbox.SubscriberConfig{strictly, withGaps, deferrer} {
		_, messages := f.subscribe(consumer, config, "orders")
		requireNext(f.t, messages, end...)
	}
	require.NoError(f.t, consumer.Close())
}

func indexOf(messages []*message.Message, uuid string) int {
	for i, msg := range messages {
		if msg.UUID == uuid {
			return i
		}
	}
	return -1
}
