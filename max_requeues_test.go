package outbox

import (
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill/components/requeuer"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

// publisherFunc is a publisher that is a function.
type publisherFunc func(topic string, messages ...*message.Message) error

func (f publisherFunc) Publish(topic string, messages ...*message.Message) error {
	return f(topic, messages...)
}

func (publisherFunc) Close() error { return nil }

func TestMaxRequeues(t *testing.T) {
	t.Parallel()

	tests := map[string]struct {
		counter string
		limit   int
		parked  bool
	}{
		"first time":           {"", 3, false},
		"below":                {"2", 3, false},
		"at the limit":         {"3", 3, true},
		"above":                {"4", 3, true},
		"no number":            {"many", 3, false},
		"no requeue at all":    {"", 0, true},
		"no number, and never": {"many", 0, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			msg := message.NewMessage("uuid", nil)
			if test.counter != "" {
				msg.Metadata.Set(requeuer.RetriesKey, test.counter)
			}
			var parked, passed []*message.Message
			publisher := publisherFunc(func(topic string, messages ...*message.Message) error {
				require.Equal(t, "parked", topic)
				parked = append(parked, messages...)
				return nil
			})
			middleware, err := MaxRequeues(test.limit, publisher, "parked")
			require.NoError(t, err)
			_, err = middleware(func(msg *message.Message) ([]*message.Message, error) {
				passed = append(passed, msg)
				return nil, nil
			})(msg)
			require.NoError(t, err)
			if test.parked {
				require.Equal(t, []*message.Message{msg}, parked)
				require.Empty(t, passed)
			} else {
				require.Equal(t, []*message.Message{msg}, passed)
				require.Empty(t, parked)
			}
			require.Equal(t, test.counter, msg.Metadata.Get(requeuer.RetriesKey))
		})
	}
}

func TestMaxRequeuesPublishError(t *testing.T) {
	t.Parallel()

	broken := errors.New("broken")
	middleware, err := MaxRequeues(0, publisherFunc(func(string, ...*message.Message) error { return broken }), "parked")
	require.NoError(t, err)
	_, err = middleware(nil)(message.NewMessage("uuid", nil))
	require.ErrorIs(t, err, broken, "the Router nacks, and the message comes again")
}

func TestMaxRequeuesArguments(t *testing.T) {
	t.Parallel()

	publisher := publisherFunc(func(string, ...*message.Message) error { return nil })
	_, err := MaxRequeues(-1, publisher, "parked")
	require.ErrorContains(t, err, "limit")
	_, err = MaxRequeues(1, nil, "parked")
	require.ErrorContains(t, err, "publisher")
	_, err = MaxRequeues(1, publisher, "")
	require.ErrorIs(t, err, ErrInvalidTopic)
}
