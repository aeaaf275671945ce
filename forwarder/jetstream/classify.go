package jetstream

import (
	"errors"

	"github.com/nats-io/nats.go"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
)

// Classify knows the errors of NATS, of this Publisher and of that of watermill-nats,
// for forwarder.Destination.Classify:
//
//   - a message that is too large, or whose topic is no subject, is at fault for good;
//   - a connection that is away or closed, an acknowledgement that does not come, a
//     stream that is not there or full, and a server that is not ready are the
//     destination's fault;
//   - all else is as with forwarder.Classify.
func Classify(err error) forwarder.Fault {
	for _, permanent := range []error{nats.ErrMaxPayload, nats.ErrBadSubject, nats.ErrBadHeaderMsg} {
		if errors.Is(err, permanent) {
			return forwarder.FaultPermanent
		}
	}
	for _, down := range []error{
		nats.ErrTimeout, nats.ErrConnectionClosed, nats.ErrConnectionDraining, nats.ErrConnectionReconnecting,
		nats.ErrReconnectBufExceeded, nats.ErrDisconnected, nats.ErrStaleConnection, nats.ErrNoServers, nats.ErrNoResponders,
		nats.ErrNoStreamResponse, nats.ErrStreamNotFound, nats.ErrJetStreamNotEnabled, nats.ErrTooManyStalledMsgs, nats.ErrAsyncPublishTimeout,
	} {
		if errors.Is(err, down) {
			return forwarder.FaultDestination
		}
	}
	var api *nats.APIError
	if errors.As(err, &api) && !outbox.IsPermanent(err) {
		return forwarder.FaultDestination // the stream's answer: it is full, has no leader, …
	}
	return forwarder.Classify(err)
}
