package outbox

import "github.com/millrace/watermill-outbox/internal/delivery"

// Permanent returns an error that matches err and says that no further attempt
// will do better: the message that fails with it becomes a dead letter at once,
// whatever RetryConfig.MaxAttempts says. Return it from a handler behind
// KeepError, or hand it to SetError before Nack. A nil error stays nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &delivery.PermanentError{Err: err}
}

// IsPermanent reports whether the error, or one that it wraps, was made by
// Permanent.
func IsPermanent(err error) bool { return delivery.IsPermanent(err) }
