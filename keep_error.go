package outbox

import (
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// errExited is noted for a handler that ended its goroutine.
var errExited = errors.New("the handler ended its goroutine (runtime.Goexit)")

// KeepError is a Router middleware that notes the error with which a message's
// handling ended, so that its dead letter can say it: Watermill's Nack carries
// none. It changes neither messages nor errors; a panic is noted and passed on.
//
// Add it before all other middlewares. The first one added is the outermost, and
// sees what the Router sees: the last error when Retry has given up, and none
// when PoisonQueue took the message.
//
//	router.AddMiddleware(outbox.KeepError, poison, retry.Middleware)
//
// What comes after the middlewares it cannot see: when messages that the handler
// returned cannot be published, the Router logs why and sends a Nack.
func KeepError(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		// Taken now: a middleware may leave another context on the message.
		ctx := msg.Context()
		returned := false
		defer func() {
			switch p := recover(); {
			case p != nil:
				noteError(ctx, fmt.Errorf("panic: %v", p))
				panic(p)
			case !returned:
				noteError(ctx, errExited)
			default:
				noteError(ctx, err)
			}
		}()
		produced, err = h(msg)
		returned = true
		return produced, err
	}
}
