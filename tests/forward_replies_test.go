package tests

import (
	"bytes"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// lostReplies loses the first reply to some messages: the broker has them, and the
// publisher's connection ends.
type lostReplies struct {
	mu   sync.Mutex
	todo map[string]bool
}

func loseReplies(proxy *brokertest.Proxy, messages ...*message.Message) *lostReplies {
	l := &lostReplies{todo: map[string]bool{}}
	for _, msg := range messages {
		l.todo[msg.UUID] = true
	}
	proxy.OnClient(func(data []byte) brokertest.Action {
		l.mu.Lock()
		defer l.mu.Unlock()
		action := brokertest.Forward
		for uuid := range l.todo {
			if bytes.Contains(data, []byte(uuid)) {
				delete(l.todo, uuid)
				action = brokertest.LoseReply
			}
		}
		return action
	})
	return l
}

func (l *lostReplies) left() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.todo)
}

// The broker took a message and the answer was lost, so that nobody knows whether it
// did. The message is published again, and nothing behind it before that: what has
// de-duplication has it once, the others twice, one behind the other. Nothing is lost,
// given up, or out of order. Field case F12.
func TestForwardLostReplies(t *testing.T) {
	t.Parallel()

	for name, inFlight := range map[string]int{"alone": 1, "beside others": 16} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := newRelay(t, forwardTopic)
			r.outage()
			sent := brokerMessages(60, 6)
			lost := map[*end]*lostReplies{}
			unanswered := []*message.Message{sent[10], sent[59]}
			for _, e := range r.ends {
				e.destination.MaxInFlight = inFlight
				lost[e] = loseReplies(e.broker.Proxy(), unanswered...)
			}
			r.publish(t, forwardTopic, sent...)
			_, stop := r.run(t, r.consumer(nil), nil)
			r.awaitTaken(t, sent)
			stop()

			r.requireNoLetters(t)
			for _, e := range r.ends {
				require.Zero(t, lost[e].left(), "%s: replies that were not lost", e.name)
				duplicates := requireInBroker(t, e.broker, forwardTopic, sent)
				switch {
				case e.deduplication != "":
					require.Zero(t, duplicates, e.name)
				case inFlight == 1:
					require.Equal(t, len(unanswered), duplicates, e.name)
				}
				// Twice only if it is the last one that its key had by then.
				last := map[string]string{}
				seen := map[string]bool{}
				for _, msg := range e.received(t, forwardTopic) {
					key := msg.Metadata[outbox.DefaultKeyMetadata]
					require.True(t, !seen[msg.UUID] || last[key] == msg.UUID, "%s: message %s came back behind others of its key", e.name, msg.Metadata["Number"])
					seen[msg.UUID], last[key] = true, msg.UUID
				}
				if inFlight == 1 {
					for _, msg := range sent {
						want := 1
						if msg == unanswered[0] || msg == unanswered[1] {
							want = 2
						}
						require.GreaterOrEqual(t, e.tap.calls(msg), want, "%s: message %s", e.name, msg.Metadata["Number"])
					}
				}
			}
		})
	}
}
