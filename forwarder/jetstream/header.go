package jetstream

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"

	outbox "github.com/millrace/watermill-outbox"
)

// ErrMetadata is matched by the error of a message whose metadata would not arrive
// as they are: NATS carries them as headers, of which the client drops keys that are
// no HTTP header's and changes values. No attempt helps, so the forwarder makes it a
// dead letter. Rename the key or encode the value, in a middleware for instance, or
// use a PublisherConfig.Marshaler that puts metadata elsewhere.
var ErrMetadata = errors.New("jetstream: metadata cannot be a header of NATS")

// checkHeader refuses what the client would change without a word.
func checkHeader(header nats.Header) error {
	for key, values := range header {
		if key == "" || strings.ContainsFunc(key, isNoToken) {
			return outbox.Permanent(fmt.Errorf("%w: key %q has characters that a header's must not have", ErrMetadata, key))
		}
		for _, value := range values {
			if strings.ContainsAny(value, "\r\n") || value != strings.Trim(value, " \t") {
				return outbox.Permanent(fmt.Errorf("%w: the value of %q has a line break, or blanks around it", ErrMetadata, key))
			}
		}
	}
	return nil
}

// isNoToken is about RFC 9110, section 5.6.2.
func isNoToken(r rune) bool {
	switch {
	case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9':
		return false
	}
	return !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
}
