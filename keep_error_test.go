package outbox

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

// delivered returns a message with a note in its context, as the engine makes
// them.
func delivered(t *testing.T) (*message.Message, *errorNote) {
	t.Helper()
	ctx := &deliveryContext{Context: t.Context()}
	return message.NewMessageWithContext(ctx, "uuid", nil), &ctx.note
}

func TestKeepError(t *testing.T) {
	t.Parallel()

	failed := errors.New("failed")
	produced := []*message.Message{message.NewMessage("produced", nil)}
	handler := func(err error) message.HandlerFunc {
		return func(*message.Message) ([]*message.Message, error) { return produced, err }
	}

	msg, note := delivered(t)
	got, err := KeepError(handler(failed))(msg)
	require.Equal(t, failed, err)
	require.Equal(t, produced, got)
	require.Equal(t, failed, note.get())

	msg, note = delivered(t)
	_, err = KeepError(handler(nil))(msg)
	require.NoError(t, err)
	require.NoError(t, note.get())

	// A message that is not from a Subscriber.
	_, err = KeepError(handler(failed))(message.NewMessage("uuid", nil))
	require.Equal(t, failed, err)
}

// A panic is noted, and goes on to whoever recovers it, with its value.
func TestKeepErrorPassesPanicsOn(t *testing.T) {
	t.Parallel()

	msg, note := delivered(t)
	h := KeepError(func(*message.Message) ([]*message.Message, error) { panic("boom") })
	require.PanicsWithValue(t, "boom", func() { _, _ = h(msg) })
	require.EqualError(t, note.get(), "panic: boom")

	msg, note = delivered(t)
	h = KeepError(func(*message.Message) ([]*message.Message, error) { panic(nil) }) //nolint:govet // what is not to be done
	require.Panics(t, func() { _, _ = h(msg) })
	require.ErrorContains(t, note.get(), "panic: ")
}

func TestKeepErrorOfAHandlerThatExits(t *testing.T) {
	t.Parallel()

	msg, note := delivered(t)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = KeepError(func(*message.Message) ([]*message.Message, error) {
			runtime.Goexit()
			return nil, nil
		})(msg)
	}()
	<-ended
	require.Equal(t, errExited, note.get())
}

// A middleware that leaves another context on the message, as Timeout does, does
// not hide where the note is.
func TestKeepErrorWhenTheContextIsReplaced(t *testing.T) {
	t.Parallel()

	failed := errors.New("failed")
	msg, note := delivered(t)
	_, err := KeepError(func(msg *message.Message) ([]*message.Message, error) {
		msg.SetContext(context.Background())
		return nil, failed
	})(msg)
	require.Equal(t, failed, err)
	require.Equal(t, failed, note.get())
}

// A handler may nack by itself and return nil.
func TestSetError(t *testing.T) {
	t.Parallel()

	msg, note := delivered(t)
	first, last := errors.New("first"), errors.New("last")
	_, err := KeepError(func(msg *message.Message) ([]*message.Message, error) {
		SetError(msg.Context(), first)
		SetError(msg.Context(), last)
		SetError(msg.Context(), nil)
		msg.Nack()
		return nil, nil
	})(msg)
	require.NoError(t, err)
	require.Equal(t, last, note.get())
	SetError(context.Background(), first)
	require.Equal(t, last, note.get())
}
