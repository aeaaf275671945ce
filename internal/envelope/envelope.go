// Package envelope reads and writes the envelope of Watermill's own forwarder
// component: a message that carries another one, with the topic it is for, as
// JSON in its payload.
package envelope

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

var (
	// ErrNotEnvelope is matched by every *Error of Unwrap.
	ErrNotEnvelope = errors.New("envelope: the payload is no envelope of Watermill's forwarder")

	// ErrCannotWrap is matched by every error of Wrap: the topic is empty, or a
	// text is not valid UTF-8, which JSON would change without a word.
	ErrCannotWrap = errors.New("envelope: the message cannot be wrapped")
)

// Error says why a message is no envelope.
type Error struct {
	// UUID is the outer message's.
	UUID string
	// Reason says what is wrong, as the end of a sentence whose subject is the
	// payload.
	Reason string
	// Err, if not nil, is the cause, such as a *json.SyntaxError.
	Err error
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: of message %.200q it %s", ErrNotEnvelope, e.UUID, e.Reason)
}

// Is reports whether target is ErrNotEnvelope.
func (e *Error) Is(target error) bool { return target == ErrNotEnvelope }

// Unwrap returns the cause, if any.
func (e *Error) Unwrap() error { return e.Err }

// content is what the payload of an envelope holds. The names are Watermill's.
type content struct {
	DestinationTopic string            `json:"destination_topic"`
	UUID             string            `json:"uuid"`
	Payload          []byte            `json:"payload"` // base64, or null
	Metadata         map[string]string `json:"metadata"`
}

// Unwrap returns the message inside an envelope and the topic it is for. The
// inner message has the context of the outer one; its metadata are never nil,
// and its payload is nil where the JSON says null or nothing. The outer
// message's own UUID and metadata are not looked at: Watermill's are a new UUID
// and none.
//
// What Watermill's forwarder cannot unwrap, this cannot either, and it is an
// *Error; so is text that is not valid UTF-8, which the former would change. The
// outer message is not changed.
func Unwrap(msg *message.Message) (topic string, inner *message.Message, err error) {
	fail := func(reason string, err error) (string, *message.Message, error) {
		return "", nil, &Error{UUID: msg.UUID, Reason: reason, Err: err}
	}
	if len(msg.Payload) == 0 {
		return fail("is empty", nil)
	}
	if !utf8.Valid(msg.Payload) {
		return fail("is not valid UTF-8", nil)
	}
	var c content
	if err := json.Unmarshal(msg.Payload, &c); err != nil {
		return fail(reason(err), err)
	}
	if c.DestinationTopic == "" {
		return fail("has no destination_topic", nil)
	}
	inner = message.NewMessage(c.UUID, c.Payload)
	if c.Metadata != nil {
		inner.Metadata = c.Metadata
	}
	inner.SetContext(msg.Context())
	return c.DestinationTopic, inner, nil
}

// reason puts an error of encoding/json into the words of Error.Reason.
func reason(err error) string {
	var wrongType *json.UnmarshalTypeError
	var notBase64 base64.CorruptInputError
	switch {
	case errors.As(err, &wrongType) && wrongType.Field == "":
		return fmt.Sprintf("is JSON, but no object: it is of type %s", wrongType.Value)
	case errors.As(err, &wrongType):
		return fmt.Sprintf("has a %s of the wrong type: %s", wrongType.Field, wrongType.Value)
	case errors.As(err, &notBase64):
		return "has a payload that is not base64"
	}
	return fmt.Sprintf("is not valid JSON: %v", err)
}

// Wrap returns an envelope that carries a message to a topic, as Watermill's
// forwarder.NewPublisher makes them: with a new UUID, the message's context, and
// no metadata. The message is not changed. Errors match ErrCannotWrap.
func Wrap(topic string, msg *message.Message) (*message.Message, error) {
	fail := func(problem string) (*message.Message, error) {
		return nil, fmt.Errorf("%w: uuid %.200q, topic %.200q: %s", ErrCannotWrap, msg.UUID, topic, problem)
	}
	if topic == "" {
		return fail("the topic is empty")
	}
	if !utf8.ValidString(topic) {
		return fail("the topic is not valid UTF-8")
	}
	if !utf8.ValidString(msg.UUID) {
		return fail("the uuid is not valid UTF-8")
	}
	for key, value := range msg.Metadata {
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			return fail(fmt.Sprintf("the metadata under %.100q are not valid UTF-8", key))
		}
	}
	payload, err := json.Marshal(content{topic, msg.UUID, msg.Payload, msg.Metadata})
	if err != nil {
		return fail(err.Error())
	}
	outer := message.NewMessage(watermill.NewUUID(), payload)
	outer.SetContext(msg.Context())
	return outer, nil
}
