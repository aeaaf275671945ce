package outbox

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/metadata"
)

// Bounds of what can be stored, in bytes. Names are bounded because they stand
// in indexes.
const (
	MaxTopicBytes         = 1024
	MaxUUIDBytes          = 1024
	MaxOrderingKeyBytes   = 1024
	MaxConsumerGroupBytes = 1024
	MaxMetadataBytes      = 1 << 20
)

// ValidateTopic reports whether topic can be published to and subscribed: any
// valid UTF-8 without NUL, of 1 to MaxTopicBytes bytes. Case, blanks, quotes
// and dots are kept as they are. The error matches ErrInvalidTopic.
func ValidateTopic(topic string) error {
	if topic == "" {
		return fmt.Errorf("%w: it is empty", ErrInvalidTopic)
	}
	if problem := textProblem(topic, MaxTopicBytes); problem != "" {
		return fmt.Errorf("%w %.200q: it %s", ErrInvalidTopic, topic, problem)
	}
	return nil
}

// textProblem says why s cannot be stored in a text column, or "".
func textProblem(s string, limit int) string {
	switch {
	case len(s) > limit:
		return fmt.Sprintf("has %d bytes, the limit is %d", len(s), limit)
	case !utf8.ValidString(s):
		return "is not valid UTF-8"
	case strings.IndexByte(s, 0) >= 0:
		return "contains a NUL character, which PostgreSQL cannot store"
	}
	return ""
}

// record is one message as it will be stored.
type record struct {
	key      *string // nil: no ordering key
	uuid     string
	metadata string // JSON
	payload  []byte // nil: NULL
	// due is when it is to be delivered, by a clock that only the database
	// has; nil: at once.
	due *string
}

// record checks a message and takes over what is stored of it. The payload is
// shared with the message, which must not change before Publish returns. delayed
// is the metadata that the message's context asks for.
func (p *Publisher) record(topic string, index int, msg *message.Message, delayed message.Metadata) (record, error) {
	if msg == nil {
		return record{}, &MessageError{Topic: topic, Index: index, Field: "message", Problem: "is nil"}
	}
	fail := func(field, problem string, err error) (record, error) {
		return record{}, &MessageError{Topic: topic, Index: index, UUID: msg.UUID, Field: field, Problem: problem, Err: err}
	}
	if problem := textProblem(msg.UUID, MaxUUIDBytes); problem != "" {
		return fail("uuid", problem, nil)
	}
	if len(msg.Payload) > p.config.MaxPayloadBytes {
		return fail("payload", fmt.Sprintf("has %d bytes, the limit is %d (PublisherConfig.MaxPayloadBytes)", len(msg.Payload), p.config.MaxPayloadBytes), nil)
	}
	all := withDelay(msg.Metadata, delayed)
	size := 2
	for name, value := range all {
		size += len(name) + len(value)
		if problem := textProblem(name, MaxMetadataBytes); problem != "" {
			return fail("metadata", fmt.Sprintf("key %.100q %s", name, problem), nil)
		}
		if problem := textProblem(value, MaxMetadataBytes); problem != "" {
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
	r := record{uuid: msg.UUID, metadata: "{}", payload: msg.Payload, due: due}
	if len(all) > 0 {
		r.metadata = string(metadata.Append(make([]byte, 0, size+8*len(all)), all))
	}
	if key := p.config.OrderingKey(topic, msg); key != "" {
		if problem := textProblem(key, MaxOrderingKeyBytes); problem != "" {
			return fail("ordering key", problem, nil)
		}
		r.key = &key
	}
	return r, nil
}
