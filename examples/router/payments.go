package main

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
)

var (
	errBusy    = errors.New("payment provider is busy")
	errExpired = errors.New("card expired")
)

// payments handles the orders and keeps book of it.
type payments struct {
	out io.Writer
	// complete is closed when each order is paid or poisoned.
	complete chan struct{}

	mu     sync.Mutex
	orders int
	calls  map[string]int
	paid   map[string]int
	// reasons are those of the poisoned orders.
	reasons map[string][]string
}

func newPayments(orders int, out io.Writer) *payments {
	return &payments{
		out: out, complete: make(chan struct{}), orders: orders,
		calls: map[string]int{}, paid: map[string]int{}, reasons: map[string][]string{},
	}
}

// pay is the handler of the orders. A nil error acks the message.
func (p *payments) pay(msg *message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	order := string(msg.Payload)
	p.calls[order]++
	err := charge(order, p.calls[order])
	if err != nil {
		fmt.Fprintf(p.out, "  %s, call %d: %s\n", order, p.calls[order], err)
		return err
	}
	fmt.Fprintf(p.out, "  %s, call %d: paid\n", order, p.calls[order])
	p.paid[order]++
	p.check()
	return nil
}

// charge is the payment provider.
func charge(order string, call int) error {
	switch {
	case order == "order-2" && call <= 2:
		return errBusy
	case order == "order-4":
		return errExpired
	}
	return nil
}

// poisoned is the handler of the poison topic. The message is what it was, and
// its metadata say why it is there.
func (p *payments) poisoned(msg *message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	order, reason := string(msg.Payload), msg.Metadata.Get(middleware.ReasonForPoisonedKey)
	fmt.Fprintf(p.out, "  %s is in the poison topic, from topic %s and handler %s: %s\n",
		order, msg.Metadata.Get(middleware.PoisonedTopicKey), msg.Metadata.Get(middleware.PoisonedHandlerKey), reason)
	p.reasons[order] = append(p.reasons[order], reason)
	p.check()
	return nil
}

// check closes complete, once. The caller holds mu.
func (p *payments) check() {
	if len(p.paid)+len(p.reasons) == p.orders {
		select {
		case <-p.complete:
		default:
			close(p.complete)
		}
	}
}

func (p *payments) result() result {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := result{orders: p.orders}
	for _, n := range p.calls {
		r.calls += n
	}
	for _, n := range p.paid {
		r.paid += n
	}
	for order, reasons := range p.reasons {
		r.poisoned += len(reasons)
		r.reason, r.callsOfIt = reasons[0], p.calls[order]
	}
	return r
}

// result is the outcome.
type result struct {
	orders, paid, calls, poisoned int
	// reason and callsOfIt are those of the poisoned order.
	reason    string
	callsOfIt int
	// redelivered counts what came again when everything was done.
	redelivered int
}

// ok reports whether one order was poisoned, after all its retries and with the
// reason, the others were paid once, and everything was acked.
func (r result) ok() bool {
	return r.paid == r.orders-1 && r.poisoned == 1 && r.reason == errExpired.Error() &&
		r.callsOfIt == 1+maxRetries && r.redelivered == 0
}

// String is the last line that the program prints.
func (r result) String() string {
	return fmt.Sprintf("orders=%d paid=%d calls=%d poisoned=%d reason=%q calls_of_it=%d redelivered=%d",
		r.orders, r.paid, r.calls, r.poisoned, r.reason, r.callsOfIt, r.redelivered)
}
