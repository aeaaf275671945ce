package jetstream

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"

	outbox "github.com/millrace/watermill-outbox"
)

// ErrMetadata is matched by the error of a message whose metadata would not arrive
// as they are: NATS carries them as headers, of which the client drops keys that are
// no HTTP header's and changes values. No attempt helps, so the forwarder makes it a
// dead letter. Rename the key or encode the value, in a middleware for instance, or
// use a PublisherConfig.Marshaler that puts metadata elsewhere.
var ErrMetadata = errors.New("jetstream: metadata cannot be a header of NATS")

// headers makes the messages that wmnats.NATSMarshaler makes, with a third of its
// allocations: it knows how many headers there are.
type headers struct{}

func (headers) Marshal(topic string, msg *message.Message) (*nats.Msg, error) {
	header, values := make(nats.Header, len(msg.Metadata)+1), make([]string, 0, len(msg.Metadata)+1)
	set := func(key, value string) {
		values = append(values, value)
		header[key] = values[len(values)-1 : len(values) : len(values)]
	}
	set(wmnats.WatermillUUIDHdr, msg.UUID)
	for key, value := range msg.Metadata {
		set(key, value)
	}
	return &nats.Msg{Subject: topic, Data: msg.Payload, Header: header}, nil
}

// checkHeader refuses what the client would change without a word.
func checkHeader(header nats.Header) error {
	for key, values := range header {
		if !isToken(key) {
			return outbox.Permanent(fmt.Errorf("%w: key %q has characters that a header's must not have", ErrMetadata, key))
		}
		for _, value := range values {
			if !isValue(value) {
				return outbox.Permanent(fmt.Errorf("%w: the value of %q has a line break, or blanks around it", ErrMetadata, key))
			}
		}
	}
	return nil
}

// tokens are the characters of a token, which is about what RFC 9110, section
// 5.6.2, says.
var tokens = func() (set [utf8.RuneSelf]bool) {
	for _, c := range "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" {
		set[c] = true
	}
	return set
}()

func isToken(key string) bool {
	for i := range len(key) {
		if c := key[i]; c >= utf8.RuneSelf || !tokens[c] {
			return false
		}
	}
	return key != ""
}

func isValue(value string) bool {
	if value == "" {
		return true
	}
	return !isBlank(value[0]) && !isBlank(value[len(value)-1]) && strings.IndexByte(value, '\r') < 0 && strings.IndexByte(value, '\n') < 0
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' }
