package jetstream

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/forwarder"
)

// answers is a connection to a JetStream that answers after a second as the payload
// says: "ok", "again" (which the stream has), "no", or not at all; "unsent" cannot be
// sent. "cut" and "closed" end the connection soon, "cut at once" at once, with all
// answers that are on their way.
type answers struct {
	receive nats.MsgHandler

	mu         sync.Mutex
	status     nats.Status
	reconnects uint64
	losses     int
	// atStatus is done once, after the status was asked for.
	atStatus  func()
	listeners map[chan nats.Status][]nats.Status
	sent      []string
}

var errUnsent = errors.New("unsent")

func newAnswers() *answers {
	return &answers{status: nats.CONNECTED, listeners: map[chan nats.Status][]nats.Status{}}
}

func (*answers) NewInbox() string { return "_INBOX.x" }

func (a *answers) Subscribe(_ string, receive nats.MsgHandler) (*nats.Subscription, error) {
	a.receive = receive
	return nil, nil //nolint:nilnil // nothing is done with it
}

func (a *answers) Status() nats.Status {
	a.mu.Lock()
	status, then := a.status, a.atStatus
	a.atStatus = nil
	a.mu.Unlock()
	if then != nil {
		then()
	}
	return status
}

func (a *answers) Stats() nats.Statistics {
	a.mu.Lock()
	defer a.mu.Unlock()
	return nats.Statistics{Reconnects: a.reconnects}
}

func (a *answers) StatusChanged(statuses ...nats.Status) chan nats.Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	listener := make(chan nats.Status, 10)
	a.listeners[listener] = statuses
	return listener
}

func (a *answers) RemoveStatusListener(listener chan nats.Status) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.listeners, listener)
}

// become changes the status and tells who listens, as the client does: who has not
// heard the last is told nothing and forgotten.
func (a *answers) become(status nats.Status) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status = status
	if status == nats.CONNECTED {
		a.reconnects++
	} else {
		a.losses++
	}
	for listener, of := range a.listeners {
		if !slices.Contains(of, status) {
			continue
		}
		select {
		case <-listener:
			delete(a.listeners, listener)
		default:
			listener <- status
		}
	}
}

func (a *answers) PublishMsg(msg *nats.Msg) error {
	payload := string(msg.Data)
	a.mu.Lock()
	a.sent = append(a.sent, payload)
	losses := a.losses
	a.mu.Unlock()
	later := func(text string) {
		time.AfterFunc(time.Second, func() {
			a.mu.Lock()
			lost := a.losses > losses
			a.mu.Unlock()
			if !lost {
				a.receive(&nats.Msg{Subject: msg.Reply, Data: []byte(text)})
			}
		})
	}
	switch payload {
	case "unsent":
		return errUnsent
	case "slow":
		time.Sleep(forwarder.DefaultPublishTimeout * 2 / 5)
	case "cut":
		time.AfterFunc(time.Second/2, func() { a.become(nats.RECONNECTING) })
	case "closed":
		time.AfterFunc(time.Second/2, func() { a.become(nats.CLOSED) })
	case "cut at once":
		a.become(nats.RECONNECTING)
		a.become(nats.CONNECTED)
		synctest.Wait()
	case "ok":
		later(`{"stream":"orders","seq":1}`)
	case "again":
		later(`{"stream":"orders","seq":1,"duplicate":true}`)
	case "no":
		later(`{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"},"stream":"orders","seq":0}`)
	}
	return nil
}

// publisherOn returns a Publisher whose messages have so much time.
func publisherOn(t *testing.T, conn *answers, limit time.Duration) (publisher *Publisher, batch func(payloads ...string) []forwarder.Outgoing) {
	t.Helper()
	publisher, err := newPublisher(conn, PublisherConfig{})
	require.NoError(t, err)
	t.Cleanup(func() { // a bubble ends when all in it has
		require.NoError(t, publisher.Close())
		require.Empty(t, conn.listeners)
	})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return publisher, func(payloads ...string) (batch []forwarder.Outgoing) {
		for _, payload := range payloads {
			batch = append(batch, forwarder.Outgoing{Topic: "t", Message: message.NewMessageWithContext(ctx, "u", []byte(payload))})
		}
		return batch
	}
}

// unanswered begins a call of a message that gets no answer; its results will be in the
// channel.
func unanswered(t *testing.T, publisher *Publisher, batch func(payloads ...string) []forwarder.Outgoing) chan []error {
	t.Helper()
	results := make(chan []error, 1)
	go func() { results <- publisher.PublishBatch(batch("")) }()
	synctest.Wait()
	require.Empty(t, results)
	return results
}

// requireErrors compares what became of each message, nil for those that are safe.
func requireErrors(t *testing.T, want, got []error) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		require.ErrorIs(t, got[i], want[i], "message %d", i)
	}
}

// Each message has the answer that it got, though the time was over when another one,
// which got none, had been waited for.
func TestPublishBatch(t *testing.T) {
	t.Parallel()

	for range 32 { // what is ready at the same time is chosen at random
		synctest.Test(t, func(t *testing.T) {
			publisher, batch := publisherOn(t, newAnswers(), time.Minute)
			errs := publisher.PublishBatch(batch("", "ok", "no", "again", "unsent", "no", ""))
			refused := &nats.APIError{Code: 503, ErrorCode: 10077}
			requireErrors(t, []error{context.DeadlineExceeded, nil, refused, nil, errUnsent, refused, context.DeadlineExceeded}, errs)

			safe := batch("ok", "again")
			safe[0].Message.SetContext(t.Context())
			safe[1].Message.SetContext(t.Context())
			require.Nil(t, publisher.PublishBatch(safe), "nil if all are safe")
			require.Empty(t, publisher.acks.calls, "what is over is forgotten")
			require.NoError(t, publisher.Close())
			requireErrors(t, []error{ErrClosed}, publisher.PublishBatch(safe[:1]))
		})
	}
}

// A message whose time is over is not sent, one that has no time of its own has the
// publisher's.
func TestTimeLimits(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		conn := newAnswers()
		publisher, batch := publisherOn(t, conn, time.Second/2)
		time.Sleep(time.Second)
		requireErrors(t, []error{context.DeadlineExceeded}, publisher.PublishBatch(batch("unsent")))

		endless := batch("", "ok", "")
		for _, out := range endless {
			out.Message.SetContext(context.Background())
		}
		start := time.Now()
		requireErrors(t, []error{context.DeadlineExceeded, nil, context.DeadlineExceeded}, publisher.PublishBatch(endless))
		require.Equal(t, forwarder.DefaultPublishTimeout, time.Since(start), "together, not each")

		// As long as there is time messages are sent, however long each takes.
		slow := batch(slices.Repeat([]string{"slow"}, 5)...)
		for _, out := range slow {
			out.Message.SetContext(context.Background())
		}
		late := context.DeadlineExceeded
		requireErrors(t, []error{late, late, late, late, late}, publisher.PublishBatch(slow))
		require.Equal(t, []string{"", "ok", "", "slow", "slow", "slow"}, conn.sent)
	})
	_, err := newPublisher(newAnswers(), PublisherConfig{AckTimeout: -1})
	require.ErrorContains(t, err, "AckTimeout must not be negative")
}

// When the connection is lost no answer is waited for, since none comes, and what is
// not sent is not sent any more.
func TestConnectionIsLost(t *testing.T) {
	t.Parallel()

	for payload, want := range map[string]error{"cut": nats.ErrDisconnected, "closed": nats.ErrConnectionClosed, "cut at once": nats.ErrDisconnected} {
		synctest.Test(t, func(t *testing.T) {
			conn := newAnswers()
			publisher, batch := publisherOn(t, conn, time.Minute)
			start := time.Now()
			messages := batch("", "unsent", payload, "ok")
			requireErrors(t, []error{want, errUnsent, want, want}, publisher.PublishBatch(messages))
			require.Less(t, time.Since(start), time.Second)
			require.Equal(t, forwarder.FaultDestination, Classify(want))
			if payload == "cut at once" {
				require.Equal(t, []string{"", "unsent", payload}, conn.sent)
			}
			if payload != "closed" {
				conn.become(nats.CONNECTED)
				require.Nil(t, publisher.PublishBatch(batch("ok")), "and then all is well")
				requireErrors(t, []error{want}, publisher.PublishBatch(batch(payload)))
			}
		})
	}
}

// A call that begins while the connection is being lost is none that waits for ever,
// and one that begins when it is there again is not failed by what was before.
func TestCallsThatBeginMeanwhile(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		conn := newAnswers()
		publisher, batch := publisherOn(t, conn, time.Minute)
		start := time.Now()
		conn.atStatus = func() {
			conn.become(nats.RECONNECTING)
			synctest.Wait()
		}
		requireErrors(t, []error{nats.ErrDisconnected}, publisher.PublishBatch(batch("ok")))
		require.Zero(t, time.Since(start))
		require.Empty(t, conn.sent)

		conn.become(nats.CONNECTED)
		synctest.Wait()
		publisher.acks.mu.Lock() // the watch does not get further for a while
		conn.become(nats.RECONNECTING)
		conn.become(nats.CONNECTED)
		publisher.acks.mu.Unlock()
		require.Nil(t, publisher.PublishBatch(batch("ok")))
	})
}

// That the client forgets who does not listen in time leaves nothing waiting, then or at
// the next loss.
func TestWatchIsLate(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		conn := newAnswers()
		publisher, batch := publisherOn(t, conn, time.Minute)
		lost := func(results chan []error) {
			t.Helper()
			synctest.Wait()
			require.Len(t, results, 1)
			requireErrors(t, []error{nats.ErrDisconnected}, <-results)
		}

		results := unanswered(t, publisher, batch)
		publisher.acks.mu.Lock()
		for range 3 { // one is heard, one waits to be, one is dropped with that
			conn.become(nats.RECONNECTING)
		}
		conn.become(nats.CONNECTED)
		publisher.acks.mu.Unlock()
		lost(results)
		require.Nil(t, publisher.PublishBatch(batch("ok")))

		results = unanswered(t, publisher, batch)
		conn.become(nats.RECONNECTING)
		lost(results)
	})
}

// Nothing is sent on a connection on which no answer would be received.
func TestConnectionIsAway(t *testing.T) {
	t.Parallel()

	for status, want := range map[nats.Status]error{
		nats.DRAINING_SUBS: nats.ErrConnectionDraining, nats.DRAINING_PUBS: nats.ErrConnectionDraining,
		nats.RECONNECTING: nats.ErrConnectionReconnecting, nats.CLOSED: nats.ErrConnectionClosed,
	} {
		synctest.Test(t, func(t *testing.T) {
			conn := newAnswers()
			publisher, batch := publisherOn(t, conn, time.Minute)
			conn.become(status)
			requireErrors(t, []error{want, want}, publisher.PublishBatch(batch("ok", "ok")))
			require.Empty(t, conn.sent)
			require.Equal(t, forwarder.FaultDestination, Classify(want))
		})
	}
}

// Close waits for a call, which ends if the connection does.
func TestCloseWhileCallsRun(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		conn := newAnswers()
		publisher, batch := publisherOn(t, conn, time.Minute)
		results := unanswered(t, publisher, batch)
		time.AfterFunc(time.Second, func() { conn.become(nats.RECONNECTING) })
		start := time.Now()
		var closing sync.WaitGroup
		closing.Go(func() { require.NoError(t, publisher.Close()) })
		require.NoError(t, publisher.Close())
		closing.Wait()
		require.Equal(t, time.Second, time.Since(start))
		requireErrors(t, []error{nats.ErrDisconnected}, <-results)
	})
}

// What comes late, twice or from elsewhere changes nothing.
func TestAnswersNobodyWaitsFor(t *testing.T) {
	t.Parallel()

	acks := newAcks("_INBOX.x")
	call := acks.begin(1, 0)
	ok := []byte(`{"stream":"s","seq":1}`)
	for _, subject := range []string{"_INBOX.x.1", "_INBOX.x.1-1", "_INBOX.x.2-0", "_INBOX.x.1--1", "_INBOX.x.1-0-0", "_INBOX.x.-", "_INBOX.x.", "_INBOX.x", "1-0", "", "a.b"} {
		acks.receive(&nats.Msg{Subject: subject, Data: ok})
	}
	require.NotNil(t, call.watch(0))
	require.ErrorIs(t, call.errors([]forwarder.Outgoing{{}})[0], errNotKnown)
	acks.receive(&nats.Msg{Subject: call.reply(0), Data: ok})
	acks.receive(&nats.Msg{Subject: call.reply(0), Data: []byte("nonsense")})
	require.Nil(t, call.watch(0))
	acks.fail(1, nats.ErrDisconnected)
	require.Nil(t, call.errors([]forwarder.Outgoing{{}}))
	call.end()
	acks.receive(&nats.Msg{Subject: call.reply(0), Data: ok})
}

// Only what names the stream and no error says that a message is there.
func TestAnswers(t *testing.T) {
	t.Parallel()

	for data, want := range map[string]error{
		`{"stream":"s","seq":1}`:                                       nil,
		`{"stream":"s","domain":"d","seq":1}`:                          nil,
		` { "seq": 1, "stream": "s" }`:                                 nil,
		`{"stream":"\"error\"","seq":1}`:                               nil,
		`{"stream":"s","seq":0,"error":{"code":503,"err_code":10077}}`: &nats.APIError{ErrorCode: 10077},
		`{"error":{"code":400,"err_code":10060}}`:                      &nats.APIError{ErrorCode: 10060},
		`{"stream":"","seq":1}`:                                        nats.ErrInvalidJSAck,
		`{"seq":1}`:                                                    nats.ErrInvalidJSAck,
		`{}`:                                                           nats.ErrInvalidJSAck,
		`{"stream":"s","seq":`:                                         nats.ErrInvalidJSAck,
		`{"stream":"s", oops}`:                                         nats.ErrInvalidJSAck,
		`{"stream":"`:                                                  nats.ErrInvalidJSAck,
		`thanks`:                                                       nats.ErrInvalidJSAck,
		``:                                                             nats.ErrInvalidJSAck,
	} {
		err := read(&nats.Msg{Data: []byte(data)})
		if want == nil {
			require.NoError(t, err, data)
		} else {
			require.ErrorIs(t, err, want, data)
		}
	}
	require.ErrorIs(t, read(&nats.Msg{Header: nats.Header{"Status": {"503"}}}), nats.ErrNoResponders)
}
