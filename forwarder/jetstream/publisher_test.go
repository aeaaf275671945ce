package jetstream

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"

	"github.com/millrace/watermill-outbox/forwarder"
)

// answers is a JetStream that answers after a second as the payload says: "ok", "no",
// or not at all.
type answers struct{ nats.JetStreamContext }

var errRefused = errors.New("refused")

func (answers) PublishMsgAsync(msg *nats.Msg, _ ...nats.PubOpt) (nats.PubAckFuture, error) {
	f := &future{ok: make(chan *nats.PubAck, 1), err: make(chan error, 1)}
	time.AfterFunc(time.Second, func() {
		switch string(msg.Data) {
		case "ok":
			f.ok <- &nats.PubAck{}
		case "no":
			f.err <- errRefused
		}
	})
	return f, nil
}

type future struct {
	nats.PubAckFuture

	ok  chan *nats.PubAck
	err chan error
}

func (f *future) Ok() <-chan *nats.PubAck { return f.ok }

func (f *future) Err() <-chan error { return f.err }

// Each message has the answer that it got, though the time was over when another one,
// which got none, had been waited for.
func TestPublishBatch(t *testing.T) {
	t.Parallel()

	for range 32 { // what is ready at the same time is chosen at random
		synctest.Test(t, func(t *testing.T) {
			publisher, err := NewPublisher(answers{}, PublisherConfig{})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var batch []forwarder.Outgoing
			for _, payload := range []string{"", "ok", "no", "ok", "no", ""} {
				batch = append(batch, forwarder.Outgoing{Topic: "t", Message: message.NewMessageWithContext(ctx, "u", []byte(payload))})
			}
			errs := publisher.PublishBatch(batch)
			for i, want := range []error{context.DeadlineExceeded, nil, errRefused, nil, errRefused, context.DeadlineExceeded} {
				if !errors.Is(errs[i], want) {
					t.Errorf("message %d: %v, want %v", i, errs[i], want)
				}
			}
			batch[1].Message.SetContext(t.Context())
			if errs := publisher.PublishBatch(batch[1:2]); errs != nil {
				t.Errorf("%v, want nil if all are safe", errs)
			}
			if err := publisher.Close(); err != nil {
				t.Fatal(err)
			}
			if errs := publisher.PublishBatch(batch[:1]); !errors.Is(errs[0], ErrClosed) {
				t.Errorf("%v, want ErrClosed", errs)
			}
		})
	}
}
