package tests

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
)

const (
	// refusedTopic is one that brokers refuse, asideTopic takes what is given up.
	refusedTopic = "refused"
	asideTopic   = "aside"
	// toKey is the metadata that says which topic a message goes to.
	toKey = "to"
)

// addressed sends messages to topics of their own by the template "{metadata:to}".
func addressed(messages []*message.Message, topic string) []*message.Message {
	for _, msg := range messages {
		msg.Metadata.Set(toKey, topic)
	}
	return messages
}

// newPoisonRelay is a relay whose messages go where they say, and whose brokers refuse
// refusedTopic.
func newPoisonRelay(t *testing.T, topics ...string) *relay {
	t.Helper()
	r := newRelay(t, append(topics, forwardTopic)...)
	for _, e := range r.ends {
		require.NoError(t, e.broker.Refuse(t.Context(), refusedTopic))
		e.destination.Topic = "{metadata:" + toKey + "}"
	}
	return r
}

// poisoned returns messages of four keys: one in the middle of a line goes to a topic
// that is refused, and one in that of another is larger than these ends take, all
// brokers but Redis.
func (r *relay) poisoned() (sent []*message.Message, refused, large *message.Message) {
	sent = addressed(brokerMessages(48, 4), forwardTopic)
	refused, large = sent[20], sent[21]
	refused.Metadata.Set(toKey, refusedTopic)
	size := 0
	for _, e := range r.ends {
		size = max(size, e.broker.MaxPayload())
	}
	large.Payload = []byte(strings.Repeat("x", size+1))
	return sent, refused, large
}

// bad returns those of the two that an end does not take.
func (e *end) bad(refused, large *message.Message) []*message.Message {
	if e.broker.MaxPayload() == 0 {
		return []*message.Message{refused}
	}
	return []*message.Message{refused, large}
}

// A message that the broker does not take becomes a dead letter that says why, and the
// stream goes on: its neighbours, in its batch and behind it in its line, are delivered,
// once and in order. That is so if nobody says whose fault it is, after some attempts,
// and if it is known, after one. Field case F60.
func TestForwardPoison(t *testing.T) {
	t.Parallel()

	const attempts = 3
	for name, known := range map[string]bool{"unknown": false, "known": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := newPoisonRelay(t)
			sent, refused, large := r.poisoned()
			for _, e := range r.ends {
				if known {
					// Nothing else fails here.
					e.destination.Classify = func(error) forwarder.Fault { return forwarder.FaultPermanent }
				}
			}
			r.publish(t, "source", sent...)
			_, stop := r.run(t, r.consumer(nil), func(c *forwarder.Config) { c.MaxAttempts = attempts })
			for _, e := range r.ends {
				bad := e.bad(refused, large)
				e.awaitTaken(t, without(sent, bad...))
				r.awaitLetters(t, e, len(bad))
			}
			stop()

			for _, e := range r.ends {
				bad := e.bad(refused, large)
				e.requireOnce(t, forwardTopic, without(sent, bad...))
				letters := r.letters(t, e)
				require.Len(t, letters, len(bad), e.name)
				for _, msg := range bad {
					letter := letters[msg.UUID]
					reason := fmt.Sprintf("publish to topic %q of destination %q: ", msg.Metadata[toKey], e.name)
					if known {
						requireLetter(t, msg, letter, 1, reason)
						require.Equal(t, 1, e.tap.calls(msg), "%s: it is known that no attempt will do better", e.name)
						continue
					}
					// The first failure proves nothing. Its line may also be what is left, and
					// what is behind it the proof, before it has spent all.
					requireLetter(t, msg, letter, letter.Attempts, reason)
					require.LessOrEqual(t, letter.Attempts, attempts, e.name)
					require.Greater(t, e.tap.calls(msg), 1, e.name)
				}
				for _, msg := range without(sent, bad...) {
					require.Equal(t, 1, e.tap.calls(msg), "%s: a neighbour was published twice", e.name)
				}
			}
		})
	}
}

// With a poison topic that is where it goes, with the reason, and is acked when it is
// there. What is too large for the one topic is so for the other, and becomes a dead
// letter with both reasons.
func TestForwardPoisonTopic(t *testing.T) {
	t.Parallel()

	r := newPoisonRelay(t, asideTopic)
	sent, refused, large := r.poisoned()
	for _, e := range r.ends {
		e.destination.PoisonTopic = asideTopic
		e.destination.Classify = func(error) forwarder.Fault { return forwarder.FaultPermanent }
	}
	r.publish(t, "source", sent...)
	_, stop := r.run(t, r.consumer(nil), nil)
	for _, e := range r.ends {
		e.awaitTaken(t, without(sent, e.bad(refused, large)[1:]...))
		r.awaitLetters(t, e, len(e.bad(refused, large))-1)
	}
	stop()

	for _, e := range r.ends {
		bad := e.bad(refused, large)
		e.requireOnce(t, forwardTopic, without(sent, bad...))
		e.requirePoisoned(t, refused)
		letters := r.letters(t, e)
		require.Len(t, letters, len(bad)-1, e.name)
		for _, msg := range bad[1:] {
			requireLetter(t, msg, letters[msg.UUID], 1, "and the poison topic does not take it")
		}
	}
	// They are acked: nobody gets them again.
	before := map[*end]int{}
	for _, e := range r.ends {
		before[e] = e.tap.allCalls()
	}
	more := addressed(brokerMessages(8, 4), forwardTopic)
	r.publish(t, "source", more...)
	_, stop = r.run(t, r.consumer(nil), nil)
	r.awaitTaken(t, more)
	stop()
	for _, e := range r.ends {
		require.Equal(t, len(more), e.tap.allCalls()-before[e], e.name)
	}
}

// requirePoisoned checks that one message is in the poison topic, once, with the reason.
func (e *end) requirePoisoned(t *testing.T, msg *message.Message) {
	t.Helper()
	received := e.received(t, asideTopic)
	require.Equal(t, uuids([]*message.Message{msg}), uuids(received), e.name)
	copied := received[0]
	require.Contains(t, copied.Metadata[middleware.ReasonForPoisonedKey], fmt.Sprintf("publish to topic %q of destination %q: ", refusedTopic, e.name))
	require.Equal(t, "source", copied.Metadata[middleware.PoisonedTopicKey])
	require.Equal(t, e.name, copied.Metadata[middleware.PoisonedSubscriberKey])
	for key, value := range msg.Metadata {
		require.Equal(t, value, copied.Metadata[key], e.name)
	}
	require.Equal(t, string(msg.Payload), string(copied.Payload))
}

// The poison topic is not there, or does not take anything: the message is not lost and
// not acked, what others wait for goes on, and another process puts it there when it can
// be. Field case F60.
func TestForwardPoisonTopicThatRefuses(t *testing.T) {
	t.Parallel()

	r := newPoisonRelay(t)
	sent, refused, _ := r.poisoned()
	sent[21].Payload = nil
	for _, e := range r.ends {
		require.NoError(t, e.broker.Refuse(t.Context(), asideTopic))
		e.destination.PoisonTopic = asideTopic
		// Who knows the broker says so; of the poison topic nobody knows anything.
		e.tap.after = func(topic string, err error) error {
			if topic == refusedTopic {
				return outbox.Permanent(err)
			}
			return err
		}
	}
	line := func() (behind []*message.Message) {
		for i := 24; i < len(sent); i += 4 {
			behind = append(behind, sent[i])
		}
		return behind
	}()
	others := without(sent, append(line, refused)...)
	r.publish(t, "source", sent...)
	forEver := func(c *forwarder.Config) { c.MaxAttempts = -1 }
	_, stop := r.run(t, r.consumer(nil), forEver)
	for _, e := range r.ends {
		e.awaitTaken(t, others)
		require.Eventually(t, func() bool { return e.tap.failures(asideTopic) > 3 }, 2*waitFor, 5*time.Millisecond, e.name)
	}
	stop()
	r.requireNoLetters(t)
	for _, e := range r.ends {
		e.requireOnce(t, forwardTopic, others)
		for _, msg := range line {
			require.Zero(t, e.tap.calls(msg), "%s: it overtook the one that is nowhere yet", e.name)
		}
	}

	for _, e := range r.ends {
		require.NoError(t, e.broker.Declare(t.Context(), asideTopic))
	}
	_, stop = r.run(t, r.consumer(nil), forEver)
	r.awaitTaken(t, sent)
	stop()
	r.requireNoLetters(t)
	for _, e := range r.ends {
		e.requirePoisoned(t, refused)
		e.requireOnce(t, forwardTopic, without(sent, refused))
	}
}

// A dead letter that cannot be stored: the message is not lost and not acked, and what
// others wait for goes on. When it can be stored it is, once, and its line goes on. Field
// case F60.
func TestForwardDeadLetterThatCannotBeStored(t *testing.T) {
	t.Parallel()

	r := newPoisonRelay(t)
	sent, refused, large := r.poisoned()
	large.Payload = nil
	r.exec(`CREATE FUNCTION outbox.refuse() RETURNS trigger LANGUAGE plpgsql AS $body$ BEGIN RAISE EXCEPTION 'no room'; END $body$`)
	r.exec(`CREATE TRIGGER refuse BEFORE INSERT ON outbox.dead_letters FOR EACH ROW EXECUTE FUNCTION outbox.refuse()`)
	for _, e := range r.ends {
		e.destination.Classify = func(error) forwarder.Fault { return forwarder.FaultPermanent }
	}
	var line []*message.Message
	for i := 24; i < len(sent); i += 4 {
		line = append(line, sent[i])
	}
	others := without(sent, append(line, refused)...)
	r.publish(t, "source", sent...)
	book := newLogBook()
	r.logger = book
	_, stop := r.run(t, r.consumer(nil), nil)
	r.awaitTaken(t, others)
	for _, e := range r.ends {
		require.Eventually(t, func() bool {
			refused := 0
			for _, entry := range book.find("Cannot store what becomes of a message") {
				if entry.Fields["consumer_group"] == e.group() && strings.Contains(entry.Err.Error(), "no room") {
					refused++
				}
			}
			return refused > 1
		}, 2*waitFor, 5*time.Millisecond, e.name)
	}
	r.requireNoLetters(t)
	for _, e := range r.ends {
		for _, msg := range line {
			require.Zero(t, e.tap.calls(msg), "%s: it overtook the one that is nowhere yet", e.name)
		}
	}
	r.exec("DROP TRIGGER refuse ON outbox.dead_letters")
	r.awaitTaken(t, without(sent, refused))
	for _, e := range r.ends {
		r.awaitLetters(t, e, 1)
	}
	stop()
	for _, e := range r.ends {
		letters := r.letters(t, e)
		require.Len(t, letters, 1, e.name)
		requireLetter(t, refused, letters[refused.UUID], 1, "publish to topic")
		e.requireOnce(t, forwardTopic, without(sent, refused))
	}
}

// Input that makes no sense is a dead letter of every destination that says what is
// wrong with it, at the first attempt and without a publisher being asked. All else gets
// through.
func TestForwardBadInput(t *testing.T) {
	t.Parallel()

	r := newPoisonRelay(t)
	const routeKey = "route"
	sent := addressed(brokerMessages(24, 4), forwardTopic)
	nowhere, noTopic, odd, panics := sent[3], sent[6], sent[9], sent[13]
	nowhere.Metadata.Set(routeKey, "nowhere")
	delete(noTopic.Metadata, toKey)
	odd.Metadata.Set(routeKey, "error")
	panics.Metadata.Set(routeKey, "panic")
	bad := map[*message.Message]string{
		nowhere: forwarder.ErrUnknownDestination.Error(), noTopic: forwarder.ErrInvalidTopic.Error(),
		odd: "which way?", panics: "forwarder: panic: what way?",
	}
	// In the middle of good ones; envelopes have no key, so they are in no order.
	enveloped := addressed(brokerMessages(6, 6), forwardTopic)
	for _, msg := range enveloped {
		msg.Metadata[outbox.DefaultKeyMetadata] += " inside"
	}
	outer := wrapped(t, enveloped, "inner")
	for payload, reason := range map[string]string{
		"hello": "envelope", `{}`: "envelope", `{"destination_topic":"","uuid":"u","payload":"","metadata":{}}`: "envelope",
	} {
		msg := message.NewMessage("no envelope: "+payload, []byte(payload))
		bad[msg] = reason
		outer = append(outer[:3:3], append([]*message.Message{msg}, outer[3:]...)...)
	}
	for _, e := range r.ends {
		e.tap.before = func(topic string, _ *message.Message) error {
			if topic == "" {
				return errors.New("no topic")
			}
			return nil
		}
	}
	r.publish(t, "source", sent...)
	r.publish(t, "envelopes", outer...)
	_, stop := r.run(t, r.consumer(nil), func(c *forwarder.Config) {
		c.UnwrapTopic = "envelopes"
		c.Route = func(msg *message.Message, _ string) (targets []forwarder.Target, err error) {
			for _, e := range r.ends {
				targets = append(targets, forwarder.Target{Destination: e.name})
			}
			switch msg.Metadata.Get(routeKey) {
			case "nowhere":
				targets = append(targets, forwarder.Target{Destination: "nowhere"})
			case "error":
				err = errors.New("which way?")
			case "panic":
				panic("what way?")
			}
			return targets, err
		}
	})
	good := without(sent, nowhere, noTopic, odd, panics)
	r.awaitTaken(t, append(good[:len(good):len(good)], enveloped...))
	for _, e := range r.ends {
		r.awaitLetters(t, e, len(bad))
	}
	stop()
	for _, e := range r.ends {
		letters := r.letters(t, e)
		require.Len(t, letters, len(bad), e.name)
		for msg, reason := range bad {
			requireLetter(t, msg, letters[msg.UUID], 1, reason)
			require.Zero(t, e.tap.calls(msg), e.name)
		}
		e.requireOnce(t, forwardTopic, append(good[:len(good):len(good)], enveloped...))
	}
}
