package main

import (
	"encoding/json"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// endOfTest is the UUID of the last message. Messages keep their causal order,
// so when it arrives, everything published before has arrived.
const endOfTest = "end-of-test"

// audit receives the events and keeps book of them.
type audit struct {
	// complete is closed when the last message has arrived.
	complete chan struct{}

	mu         sync.Mutex
	delivered  int
	duplicated int
	outOfOrder int
	seen       map[ItemAdded]bool
	newest     map[int]int // highest version, by order
}

func newAudit() *audit {
	return &audit{complete: make(chan struct{}), seen: map[ItemAdded]bool{}, newest: map[int]int{}}
}

// handle is the Router's handler. A nil error acks the message, another one has
// it delivered again.
func (a *audit) handle(msg *message.Message) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if msg.UUID == endOfTest {
		select {
		case <-a.complete:
			a.duplicated++
		default:
			close(a.complete)
		}
		return nil
	}
	var event ItemAdded
	if err := json.Unmarshal(msg.Payload, &event); err != nil {
		return fmt.Errorf("event %s: %w", msg.UUID, err)
	}
	a.delivered++
	switch {
	case a.seen[event]:
		a.duplicated++
	case event.Version <= a.newest[event.OrderID]:
		a.outOfOrder++
	}
	a.seen[event] = true
	a.newest[event.OrderID] = max(event.Version, a.newest[event.OrderID])
	return nil
}

// count returns how many events have been delivered so far.
func (a *audit) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.delivered
}

// compare returns what was delivered of what the database says was committed.
func (a *audit) compare(committed map[int]int) result {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := result{delivered: a.delivered, duplicated: a.duplicated, outOfOrder: a.outOfOrder}
	for id, newest := range committed {
		r.published += newest
		for version := 1; version <= newest; version++ {
			// Each change adds one item.
			if !a.seen[ItemAdded{OrderID: id, Version: version, Items: version}] {
				r.lost++
			}
		}
	}
	return r
}

// result is the outcome of the quick start.
type result struct {
	published, rolledBack, delivered, lost, duplicated, outOfOrder int
}

// ok reports whether each published event was delivered once, in order, and
// nothing else was: no event of a transaction that was rolled back.
func (r result) ok() bool {
	return r.delivered == r.published && r.lost == 0 && r.duplicated == 0 && r.outOfOrder == 0
}

// String is the last line that the quick start prints.
func (r result) String() string {
	return fmt.Sprintf("published=%d rolled_back=%d delivered=%d lost=%d duplicated=%d out_of_order=%d",
		r.published, r.rolledBack, r.delivered, r.lost, r.duplicated, r.outOfOrder)
}
