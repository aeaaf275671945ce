package record

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
)

// nowhere is a publisher whose messages are gone.
type nowhere struct{}

func (nowhere) Publish(string, ...*message.Message) error { return nil }
func (nowhere) Close() error                              { return nil }

// NewDelayReader returns what Maker.Delays is to be. Only Watermill's own
// decorator knows the key under which delay.WithContext keeps its value.
func NewDelayReader() (message.Publisher, error) {
	return delay.NewPublisher(nowhere{}, delay.PublisherConfig{AllowNoDelay: true})
}

// contextDelay returns the metadata that delay.WithContext asks for, if it was
// used on the context. The decorator writes them into a message of no account,
// so that the caller's is left alone, which may also have no map to write to.
func contextDelay(ctx context.Context, reader message.Publisher) (message.Metadata, error) {
	asked := &message.Message{Metadata: message.Metadata{}}
	asked.SetContext(ctx)
	if err := reader.Publish("", asked); err != nil {
		return nil, err
	}
	return asked.Metadata, nil
}

// withDelay returns a message's metadata and the delay from its context, which
// counts unless the message has one of its own: Watermill decides by the key of
// the duration.
func withDelay(own, fromContext message.Metadata) message.Metadata {
	if len(fromContext) == 0 || own.Get(delay.DelayedForKey) != "" {
		return own
	}
	all := make(message.Metadata, len(own)+len(fromContext))
	maps.Copy(all, own)
	maps.Copy(all, fromContext)
	return all
}

// dueAt returns when a message is due, as a text that PostgreSQL reads alike in
// every session, or nil if it never waits. Whether that time is still to come is
// for the database's clock to say. An error comes with what is wrong, in words
// that name the metadata key.
//
// The duration is not computed with: it stays in the metadata of a message that
// is published again. It must be one all the same, since what wrote it meant a
// delay.
func dueAt(metadata message.Metadata) (due *string, problem string, err error) {
	if text := metadata.Get(delay.DelayedForKey); text != "" {
		if _, err := time.ParseDuration(text); err != nil {
			return nil, fmt.Sprintf("value of %q is not a duration: %.100q", delay.DelayedForKey, text), err
		}
	}
	text := metadata.Get(delay.DelayedUntilKey)
	if text == "" {
		return nil, "", nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return nil, fmt.Sprintf("value of %q is not a time in RFC 3339: %.100q", delay.DelayedUntilKey, text), err
	}
	if at.Before(time.Unix(0, 0)) {
		return nil, "", nil // by any clock; and PostgreSQL writes the year 0 another way
	}
	// The column counts microseconds, and what is later than one of them is not
	// due with it. In UTC, since Go reads offsets that PostgreSQL does not.
	at = at.Add(time.Microsecond - time.Nanosecond).Truncate(time.Microsecond)
	utc := at.UTC().Format("2006-01-02 15:04:05.000000") + "+00"
	return &utc, "", nil
}
