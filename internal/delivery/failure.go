package delivery

import (
	"errors"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/metadata"
)

// storeRetry is the pause before a verdict is tried to be stored again.
var storeRetry = backoff.Policy{Min: 50 * time.Millisecond, Max: 5 * time.Second}

// unknownError stands for what Nack does not say.
const unknownError = "the message was nacked; why is known with the middleware outbox.KeepError"

// lastAttempt is the reason of those of which more is not known.
const lastAttempt = "the last attempt ended the process that handled the message, or its reason was lost with it"

// failed counts a failed delivery and decides what follows.
func (r *run) failed(it *item, msg *message.Message, failure error) outcome {
	if isReturned(failure) {
		r.retry(it, failure, r.Backoff.Delay(1))
		return again
	}
	it.attempts++
	original, _ := it.row.DecodeMetadata() // has been decoded before
	text := unknownError
	if failure != nil {
		text = failure.Error()
	}
	// Also when a verdict follows, which may come to be stored too late.
	it.entry.Count(it.attempts-it.before, 0)
	if r.exhausted(it) || IsPermanent(failure) {
		return r.bury(it, poisoned(original, msg, text), text)
	}
	verdict := Verdict{Row: it.row, Attempts: it.attempts, After: r.Backoff.Delay(it.attempts)}
	due, delayed := delayedAnew(original, msg)
	if delayed {
		verdict.Due = due
		original[delay.DelayedUntilKey] = msg.Metadata.Get(delay.DelayedUntilKey)
		if pause := msg.Metadata.Get(delay.DelayedForKey); pause != "" {
			original[delay.DelayedForKey] = metadata.Storable(pause)
		}
		verdict.Metadata = metadata.Append(nil, original)
	}
	r.Logger.Debug("Message was nacked", r.fields(it).Add(watermill.LogFields{"reason": text, "retry_in": verdict.After.String()}))
	if delayed || r.Deferred {
		return r.settle(it, verdict)
	}
	r.Store.Nudge()
	r.retry(it, failure, verdict.After)
	return again
}

// PermanentError is a failure that no further attempt would change.
type PermanentError struct{ Err error }

func (e *PermanentError) Error() string { return e.Err.Error() }

func (e *PermanentError) Unwrap() error { return e.Err }

// IsPermanent reports whether the error is, or wraps, a PermanentError.
func IsPermanent(err error) bool {
	var permanent *PermanentError
	return errors.As(err, &permanent)
}

// ReturnedError is why a message is nacked that did not fail: it is handed out again
// after the shortest pause, at the head of a batch of what stands in its line by
// then, and nothing is counted.
type ReturnedError struct{ Err error }

func (e *ReturnedError) Error() string { return e.Err.Error() }

func (e *ReturnedError) Unwrap() error { return e.Err }

func isReturned(err error) bool {
	var returned *ReturnedError
	return errors.As(err, &returned)
}

// delayedAnew returns the time that a handler has put off its message to, as
// Watermill's DelayOnError middleware does: it changes the message's metadata and
// lets the error through.
func delayedAnew(original map[string]string, msg *message.Message) (due time.Time, ok bool) {
	if msg == nil {
		return time.Time{}, false
	}
	until := msg.Metadata.Get(delay.DelayedUntilKey)
	if until == "" || until == original[delay.DelayedUntilKey] {
		return time.Time{}, false
	}
	due, err := time.Parse(time.RFC3339, until)
	return due, err == nil
}

// poisoned returns the metadata of a dead letter: the message's own, with the
// keys of Watermill's poison queue. Errors quote any bytes.
func poisoned(original map[string]string, msg *message.Message, reason string) map[string]string {
	dead := maps.Clone(original)
	dead[metadata.ReasonForPoisonedKey] = metadata.Storable(reason)
	if msg != nil {
		ctx := msg.Context()
		dead[metadata.PoisonedTopicKey] = metadata.Storable(message.SubscribeTopicFromCtx(ctx))
		dead[metadata.PoisonedHandlerKey] = metadata.Storable(message.HandlerNameFromCtx(ctx))
		dead[metadata.PoisonedSubscriberKey] = metadata.Storable(message.SubscriberNameFromCtx(ctx))
	}
	return dead
}

// bury makes a dead letter of an item. Metadata nil means that it stays as it is,
// bytes and all.
func (r *run) bury(it *item, dead map[string]string, reason string) outcome {
	verdict := Verdict{Row: it.row, Attempts: it.attempts, Dead: true, Error: reason}
	if dead != nil {
		verdict.Metadata = metadata.Append(nil, dead)
	}
	result := r.settle(it, verdict)
	if result == settled {
		r.Logger.Info("Message became a dead letter", r.fields(it).Add(watermill.LogFields{"reason": reason}))
		r.Died(verdict)
	}
	return result
}

// settle stores a verdict.
func (r *run) settle(it *item, verdict Verdict) outcome {
	if !r.insist("Cannot store what becomes of a message; it is not passed over", it, func() error {
		return r.Store.Settle(r.lease, it.entry, verdict)
	}) {
		return stopped
	}
	return settled
}

// insist tries until it succeeds, and reports whether it did before the end.
func (r *run) insist(problem string, it *item, try func() error) bool {
	for failures := 1; r.going(); failures++ {
		err := try()
		if err == nil {
			return true
		}
		if !r.going() {
			break
		}
		pause := storeRetry.Delay(failures)
		r.Logger.Error(problem, err, r.fields(it).Add(watermill.LogFields{"failures": failures, "retry_in": pause.String()}))
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-r.over:
		}
		timer.Stop()
	}
	return false
}

// retry lets the item wait for a pause; meanwhile it holds its line, and no place in
// flight. The worker that has it still has to note how it left: see rest.
func (r *run) retry(it *item, failure error, pause time.Duration) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if it.failingSince.IsZero() {
		it.failingSince = now
	}
	r.retrying[it] = Retrying{Row: it.row, Attempts: it.attempts, Err: failure, Since: it.failingSince, Next: now.Add(pause)}
}

// rest makes an item ready again when its pause is over. It is the last that its
// worker does with it, for it may be another's at once. Called with mu held.
func (r *run) rest(it *item) {
	if r.ended {
		return // and its timer would keep all of it until then
	}
	it.timer = time.AfterFunc(time.Until(r.retrying[it].Next), func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.queue.again(it)
		r.employ()
	})
}
