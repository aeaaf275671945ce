package jetstream

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/millrace/watermill-outbox/forwarder"
)

// acks receives the acknowledgements of what is published on a connection, in one
// inbox. JetStreamContext.PublishMsgAsync does so, too, but has a channel and the
// decoding of JSON for each message, and a timer or it keeps those that never come.
// Without them all of forwarding takes a fifth less of the machine.
type acks struct {
	inbox string // ends in a dot; what call.reply adds follows

	mu    sync.Mutex
	calls map[uint64]*call
	last  uint64
}

// call is a batch whose messages are answered one by one.
type call struct {
	*acks

	number uint64
	// reconnects is how often the connection had been made anew when the call began.
	reconnects uint64
	answers    []answer
	// watched is the message that is waited for, if answered is not nil, which is closed
	// when its answer is there.
	watched  int
	answered chan struct{}
}

// answer is what is known of a message.
type answer struct {
	known bool
	err   error
}

func newAcks(inbox string) *acks { return &acks{inbox: inbox + ".", calls: map[uint64]*call{}} }

// begin begins a call of n messages, which the caller ends.
func (a *acks) begin(n int, reconnects uint64) *call {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last++
	c := &call{acks: a, number: a.last, reconnects: reconnects, answers: make([]answer, n)}
	a.calls[c.number] = c
	return c
}

// end forgets the call: what comes later is of no interest.
func (c *call) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.calls, c.number)
}

// reply is the subject that the answer to the i-th message is sent to.
func (c *call) reply(i int) string {
	subject := make([]byte, 0, len(c.inbox)+16)
	subject = append(subject, c.inbox...)
	subject = strconv.AppendUint(subject, c.number, 36)
	subject = append(subject, '-') // and no dot: permissions may name the number of tokens
	return string(strconv.AppendInt(subject, int64(i), 36))
}

// receive takes an answer.
func (a *acks) receive(msg *nats.Msg) {
	of, ours := strings.CutPrefix(msg.Subject, a.inbox)
	number, index, ok := strings.Cut(of, "-")
	n, err := strconv.ParseUint(number, 36, 64)
	i, err2 := strconv.ParseUint(index, 36, 31)
	if !ours || !ok || err != nil || err2 != nil {
		return
	}
	result := read(msg)
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.calls[n]; c != nil && int(i) < len(c.answers) {
		c.set(int(i), result)
	}
}

// settle notes what became of a message, unless it is known by now.
func (c *call) settle(i int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(i, err)
}

// known reports whether it is known what became of a message.
func (c *call) known(i int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.answers[i].known
}

// fail settles what is not answered of the calls that began before the connection was
// made anew so many times: it was lost, and the answers with it.
func (a *acks) fail(before uint64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.calls {
		if c.reconnects >= before {
			continue
		}
		for i := range c.answers {
			c.set(i, err)
		}
	}
}

// set is called with mu held.
func (c *call) set(i int, err error) {
	if c.answers[i].known {
		return
	}
	c.answers[i] = answer{known: true, err: err}
	if c.answered != nil && c.watched == i {
		close(c.answered)
		c.answered = nil
	}
}

// watch returns a channel that is closed when the i-th message is answered, nil if it
// is. It is called by one goroutine, for one message at a time.
func (c *call) watch(i int) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.answers[i].known {
		return nil
	}
	c.watched, c.answered = i, make(chan struct{})
	return c.answered
}

// errNotKnown is of a message of which nothing is known, which cannot be.
var errNotKnown = errors.New("it is not known what became of the message")

// errors returns what became of the messages: nil if all are safe.
func (c *call) errors(batch []forwarder.Outgoing) (errs []error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, out := range batch {
		err := c.answers[i].err
		if !c.answers[i].known {
			err = errNotKnown
		}
		if err == nil {
			continue
		}
		if errs == nil {
			errs = make([]error, len(batch))
		}
		errs[i] = fmt.Errorf("jetstream: publish to %q: %w", out.Topic, err)
	}
	return errs
}

// read returns what an answer says: nil if the message is in the stream. See the
// documentation of NATS, "JetStream wire API reference", publishing.
func read(msg *nats.Msg) error {
	// As a rule it says no more than the stream and the number there.
	name, ok := bytes.CutPrefix(msg.Data, []byte(`{"stream":"`))
	if ok && json.Valid(msg.Data) && name[0] != '"' && !bytes.Contains(name, []byte(`"error"`)) {
		return nil
	}
	if len(msg.Data) == 0 && msg.Header.Get("Status") == "503" {
		return nats.ErrNoResponders
	}
	var full struct {
		Error  *nats.APIError `json:"error"`
		Stream string         `json:"stream"`
	}
	switch err := json.Unmarshal(msg.Data, &full); {
	case err != nil || full.Error == nil && full.Stream == "":
		return fmt.Errorf("%w: %.100q", nats.ErrInvalidJSAck, msg.Data)
	case full.Error != nil:
		return full.Error
	}
	return nil
}
