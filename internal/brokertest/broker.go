package brokertest

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	// PublishTimeout is how long a publisher waits for an answer of a broker that
	// has stalled. Some need a few times as long to notice.
	PublishTimeout = 2 * time.Second

	// ReconnectInterval is how long a publisher that reconnects by itself waits
	// between two attempts, at most.
	ReconnectInterval = 50 * time.Millisecond

	// startTimeout bounds a start whose context has no deadline. RabbitMQ needs
	// ten seconds where two cores are busy.
	startTimeout = 2 * time.Minute

	// readyInterval is the pause between two attempts to reach a broker that is
	// starting.
	readyInterval = 20 * time.Millisecond
)

// Broker is a broker for a test. All methods may be called concurrently; Kill,
// StartAgain, Restart and Shutdown take turns.
type Broker interface {
	// Name names the kind of broker, as its package is named.
	Name() string

	// Publisher returns a publisher of its own connection, through the Proxy, which
	// the caller closes. The broker must be up.
	Publisher(logger watermill.LoggerAdapter) (message.Publisher, error)

	// Declare makes topics that are published to from now on. What is published to
	// others may be lost in silence, or refused: that is up to the broker. It may
	// be called again for the same topic.
	Declare(ctx context.Context, topics ...string) error

	// Refuse makes the broker refuse what is published to a topic, whose messages are
	// lost, until it is declared again. The publisher's error says no more than that
	// the broker does not want it.
	Refuse(ctx context.Context, topic string) error

	// MaxPayload is how many bytes the broker, or its publisher, takes for a payload
	// at most: no more than this are taken, and somewhat fewer if the limit is that of
	// a message with its metadata. 0 if there is no such limit, or it is not known.
	MaxPayload() int

	// Address says to another process of this machine where the broker is: its
	// package's Connect returns a publisher like that of Publisher, past the Proxy.
	Address() string

	// Received returns all messages of a topic that are in the broker, in its order
	// and with duplicates, read from the broker itself and not through the Proxy.
	// It takes none away. A payload is never nil. The broker must be up.
	Received(ctx context.Context, topic string) ([]*message.Message, error)

	// Proxy is between the publishers and the broker.
	Proxy() *Proxy

	// Owned reports whether nobody else uses the broker, so that it may be killed.
	Owned() bool

	// Kill ends the broker as hard as it can be. The Proxy refuses connections
	// until StartAgain, as the broker's own port does. It returns ErrNotOwned or
	// ErrDown.
	Kill(ctx context.Context) error

	// StartAgain starts the broker after Kill, on the same port and data, and
	// returns when it is ready. It returns ErrNotOwned or ErrRunning.
	StartAgain(ctx context.Context) error

	// Restart is Kill followed by StartAgain.
	Restart(ctx context.Context) error

	// Shutdown throws the broker away with its data, or with the declared topics if
	// it is not Owned. It may be called more than once.
	Shutdown() error
}

// Cleanup shuts b down when the test ends.
func Cleanup(t testing.TB, b Broker) {
	t.Cleanup(func() {
		if err := b.Shutdown(); err != nil {
			t.Errorf("shut %s down: %v", b.Name(), err)
		}
	})
}

// Prefix returns a new prefix for the topics of one Broker.
func Prefix() string { return "t" + strings.ToLower(rand.Text()[:10]) + "-" }

// WithStartTimeout returns ctx with a deadline for the start of a broker, unless
// ctx has an earlier one.
func WithStartTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, startTimeout)
}
