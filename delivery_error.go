package outbox

import (
	"context"
	"sync"
)

// errorNote is why a delivery fails, as far as somebody said so: a Nack carries
// no error. The engine puts one into the context of each delivery and reads it
// when the delivery has ended. Safe for concurrent use.
type errorNote struct {
	mu  sync.Mutex
	err error
}

func (n *errorNote) set(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err = err
}

// get returns the error that was noted last, nil if there is none.
func (n *errorNote) get() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.err
}

type errorNoteKey struct{}

// contextWithErrorNote returns a context for one delivery, and the note in it.
func contextWithErrorNote(ctx context.Context) (context.Context, *errorNote) {
	note := new(errorNote)
	return context.WithValue(ctx, errorNoteKey{}, note), note
}

// errorNoteFrom returns the note of the delivery that the context belongs to,
// nil for one that is not from a Subscriber.
func errorNoteFrom(ctx context.Context) *errorNote {
	note, _ := ctx.Value(errorNoteKey{}).(*errorNote)
	return note
}

// noteError notes why the delivery that the context belongs to fails. A nil
// error changes nothing: whoever noted one may have sent a Nack, too.
func noteError(ctx context.Context, err error) {
	if note := errorNoteFrom(ctx); note != nil && err != nil {
		note.set(err)
	}
}

// SetError says why a delivery fails, for those who call Nack themselves: call
// it before, with the context of the message. Should it be the message's last
// attempt, its dead letter says so (DeadLetter.Error). The last call counts; a
// nil error, and a context that is not of a message from a Subscriber, are
// passed over. With a Router use [KeepError]. It is safe for concurrent use.
func SetError(ctx context.Context, err error) { noteError(ctx, err) }
