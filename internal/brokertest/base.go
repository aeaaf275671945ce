package brokertest

import (
	"context"
	"errors"
	"sync"
)

// Engine is what a broker's package knows of ending and starting its server.
type Engine struct {
	// Start starts the server and waits until it is ready. Nil if the server is not
	// owned.
	Start func(ctx context.Context) error
	// Kill ends it.
	Kill func(ctx context.Context) error
	// Remove ends it if it runs, and removes its data; or deletes the topics.
	Remove func() error
}

// Base is the part of a [Broker] that is the same for all: its Proxy and its life.
type Base struct {
	engine Engine
	proxy  *Proxy

	mu      sync.Mutex // one change of state at a time; guards what follows
	down    bool
	removed bool
}

// NewBase starts an engine's server, if it is owned, and a proxy in front of addr.
// If it fails the engine's Remove was called.
func NewBase(ctx context.Context, addr string, e Engine) (*Base, error) {
	ctx, cancel := WithStartTimeout(ctx)
	defer cancel()
	b := &Base{engine: e}
	if e.Start != nil {
		if err := e.Start(ctx); err != nil {
			return nil, errors.Join(err, e.Remove())
		}
	}
	var err error
	if b.proxy, err = NewProxy(addr); err != nil {
		return nil, errors.Join(err, e.Remove())
	}
	return b, nil
}

// Proxy implements [Broker].
func (b *Base) Proxy() *Proxy { return b.proxy }

// Owned implements [Broker].
func (b *Base) Owned() bool { return b.engine.Start != nil }

// Kill implements [Broker].
func (b *Base) Kill(ctx context.Context) error {
	return b.exclusively(func() error { return b.kill(ctx) })
}

// StartAgain implements [Broker].
func (b *Base) StartAgain(ctx context.Context) error {
	return b.exclusively(func() error { return b.startAgain(ctx) })
}

// Restart implements [Broker].
func (b *Base) Restart(ctx context.Context) error {
	return b.exclusively(func() error {
		if err := b.kill(ctx); err != nil {
			return err
		}
		return b.startAgain(ctx)
	})
}

// Shutdown implements [Broker].
func (b *Base) Shutdown() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.removed {
		return nil
	}
	b.removed = true
	return errors.Join(b.proxy.Close(), b.engine.Remove())
}

func (b *Base) exclusively(change func() error) error {
	if !b.Owned() {
		return ErrNotOwned
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.removed {
		return ErrShutDown
	}
	return change()
}

func (b *Base) kill(ctx context.Context) error {
	if b.down {
		return ErrDown
	}
	b.down = true
	// The port first: a connection accepted by the proxy and reset is not what
	// clients of a broker that is down see.
	err := errors.Join(b.proxy.RefuseNew(true), b.engine.Kill(ctx))
	b.proxy.CutAll()
	return err
}

func (b *Base) startAgain(ctx context.Context) error {
	if !b.down {
		return ErrRunning
	}
	ctx, cancel := WithStartTimeout(ctx)
	defer cancel()
	if err := b.engine.Start(ctx); err != nil {
		return err
	}
	b.down = false
	return b.proxy.RefuseNew(false)
}
