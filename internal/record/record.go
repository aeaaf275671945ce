// Package record turns messages into what is stored of them, and refuses what
// cannot be stored before any SQL runs. All that write rows for a caller's
// messages go through it.
package record

import (
	"errors"
	"fmt"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/envelope"
	"github.com/millrace/watermill-outbox/internal/metadata"
)

// Record is one message as it will be stored.
type Record struct {
	Topic    string
	Key      *string // nil: no ordering key
	UUID     string
	Metadata string // JSON
	Payload  []byte // nil: NULL
	// Due is when it is to be delivered, by a clock that only the database
	// has; nil: at once.
	Due *string
}

// MaxCallBytes bounds a call whose messages travel as values of one statement:
// PostgreSQL takes no value over 1 GB, and through database/sql a payload may take
// two characters per byte.
const MaxCallBytes = 256 << 20

// Bytes is how many bytes of payload and metadata the records have.
func Bytes(records []Record) int {
	n := 0
	for _, r := range records {
		n += len(r.Payload) + len(r.Metadata)
	}
	return n
}

// Problem says which message cannot be stored, and why. It has the fields of
// outbox.MessageError, for a conversion.
type Problem struct {
	Topic   string
	Index   int
	UUID    string
	Field   string
	Problem string
	Err     error
}

// Maker makes records. Its fields are set before use, and not changed then; it
// is safe for concurrent use as far as OrderingKey is.
type Maker struct {
	// OrderingKey returns a message's key, or "".
	OrderingKey func(topic string, msg *message.Message) string
	// MaxPayloadBytes bounds a payload, and TooLong says where that was set.
	MaxPayloadBytes int
	TooLong         string
	// Envelopes is the topic whose messages are envelopes of Watermill's
	// forwarder, which are unwrapped; "": none.
	Envelopes string
	// Delays is what NewDelayReader returns.
	Delays message.Publisher
}

// Records returns the records of one call, in its order. The topic is valid. The
// payloads are shared with the messages, which are not changed.
func (m Maker) Records(topic string, messages []*message.Message) ([]Record, *Problem) {
	records := make([]Record, len(messages))
	var last *message.Message
	var delayed message.Metadata // what its context asks for
	for i, msg := range messages {
		if msg == nil {
			return nil, &Problem{Topic: topic, Index: i, Field: "message", Problem: "is nil"}
		}
		if last == nil || !Equal(msg.Context(), last.Context()) { // nearly always one context for all
			var err error
			if delayed, err = contextDelay(msg.Context(), m.Delays); err != nil {
				return nil, &Problem{Topic: topic, Index: i, UUID: msg.UUID, Field: "message", Problem: "has a delay in its context that cannot be read", Err: err}
			}
		}
		last = msg
		destination, problem := topic, (*Problem)(nil)
		if m.Envelopes != "" && topic == m.Envelopes {
			if destination, msg, problem = unwrap(topic, i, msg); problem != nil {
				return nil, problem
			}
		}
		if records[i], problem = m.record(destination, i, msg, delayed); problem != nil {
			return nil, problem
		}
	}
	return records, nil
}

// unwrap returns the message in an envelope. What decorators between Watermill's
// forwarder and the publisher wrote into the metadata of the envelope (a
// correlation id, the state of a trace, a delay) belongs to the message, which
// they would have been given had they come first: it is added to what the
// message has of its own.
func unwrap(topic string, index int, outer *message.Message) (string, *message.Message, *Problem) {
	fail := func(field, problem string, err error) (string, *message.Message, *Problem) {
		return "", nil, &Problem{Topic: topic, Index: index, UUID: outer.UUID, Field: field, Problem: problem, Err: err}
	}
	destination, inner, err := envelope.Unwrap(outer)
	var refused *envelope.Error
	if errors.As(err, &refused) {
		return fail("payload", refused.Reason+", but the topic is for envelopes of Watermill's forwarder", err)
	}
	if err := ValidateTopic(destination); err != nil {
		return fail("payload", fmt.Sprintf("is an envelope for a topic that cannot be: %v", err), err)
	}
	if len(outer.Metadata) > 0 {
		own := inner.Metadata
		inner.Metadata = maps.Clone(outer.Metadata)
		maps.Copy(inner.Metadata, own)
	}
	return destination, inner, nil
}

// record checks a message and takes over what is stored of it. The payload is
// shared with the message. delayed is the metadata that the message's context
// asks for.
func (m Maker) record(topic string, index int, msg *message.Message, delayed message.Metadata) (Record, *Problem) {
	fail := func(field, problem string, err error) (Record, *Problem) {
		return Record{}, &Problem{Topic: topic, Index: index, UUID: msg.UUID, Field: field, Problem: problem, Err: err}
	}
	if problem := TextProblem(msg.UUID, MaxUUIDBytes); problem != "" {
		return fail("uuid", problem, nil)
	}
	if len(msg.Payload) > m.MaxPayloadBytes {
		return fail("payload", fmt.Sprintf("has %d bytes, the limit is %d (%s)", len(msg.Payload), m.MaxPayloadBytes, m.TooLong), nil)
	}
	all := withDelay(msg.Metadata, delayed)
	size := 2
	for name, value := range all {
		size += len(name) + len(value)
		if problem := TextProblem(name, MaxMetadataBytes); problem != "" {
			return fail("metadata", fmt.Sprintf("key %.100q %s", name, problem), nil)
		}
		if problem := TextProblem(value, MaxMetadataBytes); problem != "" {
			return fail("metadata", fmt.Sprintf("value of %.100q %s", name, problem), nil)
		}
	}
	if size > MaxMetadataBytes {
		return fail("metadata", fmt.Sprintf("has %d bytes, the limit is %d", size, MaxMetadataBytes), nil)
	}
	due, problem, err := dueAt(all)
	if err != nil {
		return fail("metadata", problem, err)
	}
	r := Record{Topic: topic, UUID: msg.UUID, Metadata: "{}", Payload: msg.Payload, Due: due}
	if len(all) > 0 {
		r.Metadata = string(metadata.Append(make([]byte, 0, size+8*len(all)), all))
	}
	if key := m.OrderingKey(topic, msg); key != "" {
		if problem := TextProblem(key, MaxOrderingKeyBytes); problem != "" {
			return fail("ordering key", problem, nil)
		}
		r.Key = &key
	}
	return r, nil
}
