package outbox

import (
	"github.com/millrace/watermill-outbox/internal/record"
)

// Bounds of what can be stored, in bytes. Names are bounded because they stand
// in indexes.
const (
	MaxTopicBytes         = record.MaxTopicBytes       // 1 KiB
	MaxUUIDBytes          = record.MaxUUIDBytes        // 1 KiB
	MaxOrderingKeyBytes   = record.MaxOrderingKeyBytes // 1 KiB
	MaxConsumerGroupBytes = 1024
	MaxMetadataBytes      = record.MaxMetadataBytes // 1 MiB
)

// ValidateTopic reports whether topic can be published to and subscribed: any
// valid UTF-8 without NUL, of 1 to MaxTopicBytes bytes. Case, blanks, quotes
// and dots are kept as they are. The error matches ErrInvalidTopic.
func ValidateTopic(topic string) error { return record.ValidateTopic(topic) }

// textProblem says why s cannot be stored in a text column, or "".
func textProblem(s string, limit int) string { return record.TextProblem(s, limit) }
