package forwarder

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// attemptContext is the context of one call of a publisher: it ends with its
// parent, at the deadline, or when the call is over. Most publishers never ask for
// Done, so what it takes is made when somebody does.
type attemptContext struct {
	context.Context //nolint:containedctx // is a context

	deadline time.Time

	mu sync.Mutex
	// inner is made by Done; over says that the call is.
	inner  context.Context //nolint:containedctx // what this one stands for
	cancel func()
	over   bool
}

func newAttemptContext(parent context.Context, deadline time.Time) *attemptContext {
	return &attemptContext{Context: parent, deadline: deadline}
}

func (c *attemptContext) Deadline() (time.Time, bool) {
	if d, ok := c.Context.Deadline(); ok && d.Before(c.deadline) {
		return d, true
	}
	return c.deadline, true
}

func (c *attemptContext) Done() <-chan struct{} { return c.full().Done() }

func (c *attemptContext) Err() error {
	c.mu.Lock()
	inner, over := c.inner, c.over
	c.mu.Unlock()
	switch {
	case inner != nil:
		return inner.Err()
	case c.Context.Err() != nil:
		return c.Context.Err()
	case over:
		return context.Canceled
	case !time.Now().Before(c.deadline):
		return context.DeadlineExceeded
	}
	return nil
}

// full returns the context that this one stands for.
func (c *attemptContext) full() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inner != nil {
		return c.inner
	}
	c.inner, c.cancel = context.WithDeadline(c.Context, c.deadline)
	if c.over {
		c.cancel()
	}
	return c.inner
}

// end says that the call is over.
func (c *attemptContext) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	if c.cancel != nil {
		c.cancel()
	}
}

// result ends a call, and returns what it came to. A publisher whose time was up
// need not say so in its own error.
func (c *attemptContext) result(err error) error {
	if err == nil {
		c.end()
		return nil
	}
	late := c.Err()
	c.end()
	if errors.Is(late, context.DeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", late, err)
	}
	return err
}
