package outbox

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/window"
)

// MaxTopics bounds how many topics ListTopics takes: each row is compared with
// all of them.
const MaxTopics = 100

// ErrOtherTopics is returned by SubscribeBatches when the consumer group has a
// cursor over other topics: what one selects and the other does not would be
// passed over without being delivered. Choose another ConsumerGroup for other
// topics. A subscription that has begun comes to it when its cursor was removed
// and others made one: SubscriptionStatus.Err matches it as long as that is so,
// and nothing is delivered.
var ErrOtherTopics = errors.New("outbox: the consumer group reads other topics")

// Topics selects the topics of a subscription to many, see
// Subscriber.SubscribeBatches. Make one with AllTopics, ListTopics or
// MatchTopics; the zero value selects nothing and is refused. It is a value and
// safe for concurrent use.
type Topics struct {
	patterns []window.Pattern
	text     string
	problem  error
}

// AllTopics selects every topic, those that are published to later included.
func AllTopics() Topics { return MatchTopics("*") }

// ListTopics selects the topics of these names, at most MaxTopics; a name that is
// given twice counts once, and their order does not matter.
func ListTopics(names ...string) Topics {
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	t := Topics{text: strings.Join(names, ", ")}
	for _, name := range names {
		t.patterns = append(t.patterns, window.Pattern{name})
		if err := ValidateTopic(name); err != nil && t.problem == nil {
			t.problem = err
		}
	}
	if len(names) > MaxTopics {
		t.problem = fmt.Errorf("outbox: ListTopics takes at most %d topics, has %d: use MatchTopics", MaxTopics, len(names))
	}
	return t
}

// MatchTopics selects the topics that match the pattern, those that are published
// to later included: a * stands for any characters, or none, and everything else
// for itself. Several in a row are one. It must be a topic's name otherwise, see
// ValidateTopic.
func MatchTopics(pattern string) Topics {
	return Topics{patterns: []window.Pattern{strings.Split(pattern, "*")}, text: pattern, problem: ValidateTopic(pattern)}
}

// String returns the topics for logs.
func (t Topics) String() string { return t.text }

// Match reports whether the topic is selected.
func (t Topics) Match(topic string) bool {
	return len(t.patterns) > 0 && window.Matching(t.patterns...).Match(topic)
}

// Validate reports why the topics cannot be subscribed to, nil if they can.
func (t Topics) Validate() error {
	switch {
	case t.problem != nil:
		return t.problem
	case len(t.patterns) == 0:
		return errors.New("outbox: no topics are selected: use AllTopics, ListTopics or MatchTopics")
	}
	return nil
}

// otherTopics returns what says so matched by ErrOtherTopics, and any other error
// as nil.
func otherTopics(err error) error {
	var other *cursor.OtherTopicsError
	if errors.As(err, &other) {
		return fmt.Errorf("%w: %w", ErrOtherTopics, other)
	}
	return nil
}
