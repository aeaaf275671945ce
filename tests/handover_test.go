package tests

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// When the subscriber that has a topic ends in good order, the next one of its
// group goes on at once, with the message that follows: it does not wait for a
// lease to run out, and repeats nothing. In whatever way the first one ends, and
// whether the next one is its neighbour or in another process.
func TestHandOverOnClose(t *testing.T) {
	t.Parallel()

	const longLease = 10 * waitFor
	type subscription struct {
		consumer   *outbox.Consumer
		subscriber *outbox.Subscriber
		cancel     context.CancelFunc
		messages   <-chan *message.Message
	}
	ways := map[string]func(t *testing.T, s subscription){
		"close the subscriber": func(t *testing.T, s subscription) { require.NoError(t, s.subscriber.Close()) },
		"close the consumer":   func(t *testing.T, s subscription) { require.NoError(t, s.consumer.Close()) },
		"end the context": func(t *testing.T, s subscription) {
			s.cancel()
			for msg := range s.messages { // that was on its way
				msg.Nack()
			}
		},
	}
	for name, end := range ways {
		for where, together := range map[string]bool{"to a neighbour": true, "to another process": false} {
			if together && name == "close the consumer" {
				continue // ends the neighbour as well
			}
			t.Run(name+" "+where, func(t *testing.T) {
				t.Parallel()

				f := newFixture(t)
				publisher := f.publisher(outbox.PublisherConfig{})
				config := func(c *outbox.ConsumerConfig) { c.Lease = longLease }
				consumer := f.consumer(config)
				var all []subscription
				for range 4 {
					if !together {
						consumer = f.consumer(config)
					}
					subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{PageSize: 10}, nil)
					require.NoError(t, err)
					ctx, cancel := context.WithCancel(t.Context())
					t.Cleanup(cancel)
					messages, err := subscriber.Subscribe(ctx, "topic")
					require.NoError(t, err)
					all = append(all, subscription{consumer, subscriber, cancel, messages})
				}
				sent := newMessages(100)
				require.NoError(t, publisher.Publish("topic", sent...))
				for i, rest := 0, sent; i < len(all); i++ {
					// Whoever has the topic now.
					var holder subscription
					msg := anyNext(t, func(yield func(<-chan *message.Message) bool) {
						for _, s := range all {
							if !yield(s.messages) {
								return
							}
						}
					}, func(n int) { holder = all[n] })
					require.Equal(t, rest[0].UUID, msg.UUID)
					require.True(t, msg.Ack())
					requireNext(t, holder.messages, rest[1:25]...)
					rest = rest[25:]
					end(t, holder)
				}
			})
		}
	}
}

// anyNext returns the next message of any of the channels and says which one it
// came from. A closed channel has none.
func anyNext(t testing.TB, channels func(yield func(<-chan *message.Message) bool), from func(n int)) *message.Message {
	t.Helper()
	for deadline := time.Now().Add(waitFor); time.Now().Before(deadline); {
		n := 0
		for channel := range channels {
			select {
			case msg, open := <-channel:
				if open {
					from(n)
					return msg
				}
			case <-time.After(time.Millisecond):
			}
			n++
		}
	}
	require.FailNow(t, "no message")
	panic("not reached")
}

// Un-acked messages are another subscriber's at once, too.
func TestHandOverOfAMessageInFlight(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	config := func(c *outbox.ConsumerConfig) { c.Lease = 10 * waitFor }
	sent := newMessages(5)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	first, messages := f.subscribe(f.consumer(config), outbox.SubscriberConfig{CloseTimeout: -1}, "topic")
	requireNext(t, messages, sent[:2]...)
	inFlight := nextMessage(t, messages)
	require.Equal(t, sent[2].UUID, inFlight.UUID)
	_, others := f.subscribe(f.consumer(config), outbox.SubscriberConfig{}, "topic")
	require.NoError(t, first.Close())
	requireNext(t, others, sent[2:]...)
	require.True(t, inFlight.Ack(), "an ack that comes too late changes nothing")
}

// childGroup is a number of child processes of one group.
type childGroup struct {
	t        *testing.T
	children []*child
	lines    chan childLine
}

type childLine struct {
	child *child
	line  string
}

func (f *fixture) startChildren(t *testing.T, n int, topic string, lease time.Duration) *childGroup {
	t.Helper()
	g := &childGroup{t: t, lines: make(chan childLine, 10_000)}
	for range n {
		c := f.startChild(t, topic, lease)
		g.children = append(g.children, c)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for line := range c.lines {
				g.lines <- childLine{c, line}
			}
		}()
		t.Cleanup(func() {
			_ = c.command.Process.Kill() // most have ended
			<-ended
			_ = c.wait()
		})
	}
	return g
}

// next returns the next line of any child.
func (g *childGroup) next() childLine {
	g.t.Helper()
	return await(g.t, g.lines)
}

// publishNumbers publishes the numbers from first to last, each in a call of its
// own, as children report them.
func publishNumbers(t testing.TB, publisher *outbox.Publisher, topic string, first, last int) {
	t.Helper()
	for i := first; i <= last; i++ {
		require.NoError(t, publisher.Publish(topic, message.NewMessage("", []byte(strconv.Itoa(i)))))
	}
}

// awaitStored waits until the stored position of the topic covers all its
// messages, and no hole is left.
func (f *fixture) awaitStored(t testing.TB, topic string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return f.number(`SELECT count(*)::int FROM outbox.cursors c LEFT JOIN outbox.messages m
			ON m.topic = c.topic AND m.era = c.era AND NOT pg_visible_in_snapshot(m.xid, c.p)
			    AND NOT EXISTS (SELECT FROM jsonb_array_elements(c.ahead) a WHERE (a->>0)::bigint = m.id)
			WHERE c.topic = $1 AND (m.id IS NOT NULL OR c.holes <> '[]')`, topic) == 0
	}, waitFor, 5*time.Millisecond, "the position was not stored")
}

// What a process had claimed when it was killed stays claimed for hours
// elsewhere, or for ever, because the list of owners no longer has it. Others
// take over when the lease has run out. Field case F57.
func TestOthersTakeOverFromAKilledProcess(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	g := f.startChildren(t, 3, "topic", time.Second)
	alive := map[*child]bool{}
	for _, c := range g.children {
		alive[c] = true
	}
	last := 0
	round := func() *child {
		publishNumbers(t, publisher, "topic", last+1, last+20)
		last += 20
		for {
			l := g.next()
			require.True(t, alive[l.child])
			if l.line == strconv.Itoa(last) {
				f.awaitStored(t, "topic")
				return l.child
			}
		}
	}
	for range 2 {
		holder := round()
		delete(alive, holder)
		holder.kill()
	}
	survivor := round()
	require.Equal(t, 1, f.number(`SELECT count(*)::int FROM outbox.cursors c JOIN outbox.processes p ON p.holder = c.holder WHERE p.pid = $1`,
		survivor.command.Process.Pid), "the survivor holds the topic")
	survivor.stop()
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder IS NOT NULL") == 0
	}, waitFor, 5*time.Millisecond, "the cursor has an owner that does not exist")
}
