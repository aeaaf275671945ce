package main

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	// soakMaxMissing bounds what is remembered of the messages that a group was not
	// given in their turn. More than that is counted only.
	soakMaxMissing = 100_000

	// The payload begins with the number of the key and that of the message among
	// those of its key, of four bytes each, and one that is 1 if the transaction is
	// going to be rolled back.
	soakHeader = 9
)

// soakKey is an ordering key. Whoever publishes with it holds the lock until its
// transaction has ended: the numbers of its messages follow the order of the
// commits, and a transaction that is rolled back uses up none.
type soakKey struct {
	mu        sync.Mutex
	number    uint32
	committed atomic.Uint32
}

// message returns message number n of the key.
func (k *soakKey) message(n uint32, rollback bool) *message.Message {
	payload := newPayload(payloadBytes)
	binary.BigEndian.PutUint32(payload, k.number)
	binary.BigEndian.PutUint32(payload[4:], n)
	payload[8] = 0
	if rollback {
		payload[8] = 1
	}
	msg := message.NewMessage(watermill.NewUUID(), payload)
	msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint("key ", k.number))
	return msg
}

// tally is what a group has been given. What it takes in memory does not grow with
// the number of messages: of a key it is the number of the next one.
type tally struct {
	mu      sync.Mutex
	next    []uint32 // by key
	missing map[passedOver]struct{}
	// unknown is how many more than soakMaxMissing are missing.
	unknown int64
	// first counts what came for the first time, repeated what came again,
	// disordered what came after one that should follow it, rolledBack what should
	// not have come.
	first, repeated, disordered, rolledBack int64
	// strange is the first message that is none of ours.
	strange error
}

// passedOver is a message that did not come in its turn.
type passedOver struct{ key, number uint32 }

func newTally(keys int) *tally {
	return &tally{next: make([]uint32, keys), missing: map[passedOver]struct{}{}}
}

// take notes a message.
func (t *tally) take(payload []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(payload) != payloadBytes || binary.BigEndian.Uint32(payload) >= uint32(len(t.next)) {
		if t.strange == nil {
			t.strange = fmt.Errorf("a message that nobody published: %.20x", payload)
		}
		return
	}
	key, n := binary.BigEndian.Uint32(payload), binary.BigEndian.Uint32(payload[4:])
	if payload[soakHeader-1] == 1 {
		t.rolledBack++
		return
	}
	next := t.next[key]
	if n < next {
		if _, ok := t.missing[passedOver{key, n}]; !ok {
			t.repeated++
			return
		}
		delete(t.missing, passedOver{key, n})
		t.disordered++
		t.first++
		return
	}
	for ; next < n; next++ {
		if len(t.missing) >= soakMaxMissing {
			t.unknown += int64(n - next)
			break
		}
		t.missing[passedOver{key, next}] = struct{}{}
	}
	t.next[key] = n + 1
	t.first++
}

// received is how many different messages have come.
func (t *tally) received() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.first
}

// lost is how many of the committed messages have not come. No key is being
// published with.
func (t *tally) lost(keys []*soakKey) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	lost := int64(len(t.missing)) + t.unknown
	for i, k := range keys {
		if committed := k.committed.Load(); committed > t.next[i] {
			lost += int64(committed - t.next[i])
		}
	}
	return lost
}
