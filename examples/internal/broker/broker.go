// Package broker gets the examples a broker that can be taken away, each kind from
// a package below this one, so that an example compiles the client of one. It has
// nothing to do with the forwarder: an application has its broker elsewhere.
package broker

import (
	"context"
	"errors"

	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// Broker is a broker of an example. The caller calls Shutdown.
type Broker struct {
	brokertest.Broker

	// Address is where a client connects to, as a URL if the broker's clients take
	// one, and otherwise as host:port.
	Address string
	// Prefix is in front of the names of topics in the broker, since a server that
	// was named has other users. It is "" for a broker that has none.
	Prefix string
}

// New returns the Broker, whose topics have their prefix, or shuts b down. address
// is called when b is up.
func New(b brokertest.Broker, address func() (string, error)) (_ *Broker, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Shutdown())
		}
	}()
	result := &Broker{Broker: b}
	if result.Address, err = address(); err != nil {
		return nil, err
	}
	publisher, err := b.Publisher(nil)
	if err != nil {
		return nil, err
	}
	if prefixed, ok := publisher.(brokertest.Prefixed); ok {
		result.Prefix = prefixed.Prefix
	}
	return result, publisher.Close()
}

// TakeAway ends the broker as hard as it can be, or, if it has other users, cuts
// the connections to it and refuses new ones.
func (b *Broker) TakeAway(ctx context.Context) error {
	if b.Owned() {
		return b.Kill(ctx)
	}
	if err := b.Proxy().RefuseNew(true); err != nil {
		return err
	}
	b.Proxy().CutAll()
	return nil
}

// BringBack starts the broker again, or lets connections through.
func (b *Broker) BringBack(ctx context.Context) error {
	if b.Owned() {
		return b.StartAgain(ctx)
	}
	return b.Proxy().RefuseNew(false)
}
