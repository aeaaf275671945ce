package record

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Bounds of what can be stored, in bytes. Names are bounded because they stand
// in indexes.
const (
	MaxTopicBytes       = 1024
	MaxUUIDBytes        = 1024
	MaxOrderingKeyBytes = 1024
	MaxMetadataBytes    = 1 << 20
)

// ErrInvalidTopic is outbox.ErrInvalidTopic.
var ErrInvalidTopic = errors.New("outbox: invalid topic")

// ValidateTopic is outbox.ValidateTopic.
func ValidateTopic(topic string) error {
	if topic == "" {
		return fmt.Errorf("%w: it is empty", ErrInvalidTopic)
	}
	if problem := TextProblem(topic, MaxTopicBytes); problem != "" {
		return fmt.Errorf("%w %.200q: it %s", ErrInvalidTopic, topic, problem)
	}
	return nil
}

// TextProblem says why s cannot be stored in a text column, or "".
func TextProblem(s string, limit int) string {
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
