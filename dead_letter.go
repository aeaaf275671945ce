package outbox

import (
	"fmt"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/metadata"
)

// DeadLetter is a message that a consumer group has given up on.
type DeadLetter struct {
	// ID identifies the dead letter, and orders them: of one key, those that
	// died earlier have lower ones.
	ID            int64
	ConsumerGroup string
	Topic         string
	// OrderingKey is the key the message was published with, "" if none.
	OrderingKey string
	UUID        string
	// Metadata is that of the message, and what was added when it died: the
	// keys that Watermill's PoisonQueue uses. It is nil if RawMetadata, the
	// bytes as they are stored, is not a JSON object of strings.
	Metadata    message.Metadata
	RawMetadata []byte
	// Payload is nil if NULL is stored.
	Payload []byte
	// Era and MessageID identify the message that died, as Delivery.Era and
	// Delivery.ID do.
	Era       int64
	MessageID int64
	// PublishedAt is when that message was written, DiedAt when it was given up,
	// both by the database's clock.
	PublishedAt time.Time
	DiedAt      time.Time
	// Attempts is how often it was delivered to the group.
	Attempts int
	// Error is why the last attempt failed; see KeepError.
	Error string
}

// Message returns the dead letter as a message, with metadata of its own and the
// payload shared. It fails for metadata that is not a JSON object of strings.
func (d DeadLetter) Message() (*message.Message, error) {
	if d.Metadata == nil {
		if _, err := metadata.Decode(d.RawMetadata); err != nil {
			return nil, fmt.Errorf("outbox: dead letter %d: %w", d.ID, err)
		}
	}
	msg := message.NewMessage(d.UUID, d.Payload)
	maps.Copy(msg.Metadata, d.Metadata)
	return msg, nil
}

// DeadLetterAction is what happened to a dead letter.
type DeadLetterAction string

const (
	// DeadLetterDied is how each begins: attempts were exhausted, or it was
	// buried.
	DeadLetterDied DeadLetterAction = "died"
	// DeadLetterRequeued says that it went back to its group.
	DeadLetterRequeued DeadLetterAction = "requeued"
	// DeadLetterDiscarded says that it was deleted.
	DeadLetterDiscarded DeadLetterAction = "discarded"
)

// DeadLetterEvent is an entry of the audit trail. It keeps no payload, and stays
// when the dead letter is gone.
type DeadLetterEvent struct {
	ID     int64
	At     time.Time
	Action DeadLetterAction
	// Actor is who did it: DeadLettersConfig.Actor, or the database role.
	Actor  string
	Reason string
	// DeadLetterID and what follows are copies from the dead letter.
	DeadLetterID  int64
	ConsumerGroup string
	Topic         string
	OrderingKey   string
	UUID          string
	Era           int64
	MessageID     int64
	Attempts      int
}
