package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/forwarder"
)

// TestClassify looks at the errors of the publisher itself, which says the status only in
// a text unless it is made to.
func TestClassify(t *testing.T) {
	t.Parallel()

	for status, fault := range map[int]forwarder.Fault{
		http.StatusBadRequest:            forwarder.FaultPermanent,
		http.StatusRequestEntityTooLarge: forwarder.FaultPermanent,
		http.StatusUnauthorized:          forwarder.FaultDestination,
		http.StatusTooManyRequests:       forwarder.FaultDestination,
		http.StatusServiceUnavailable:    forwarder.FaultDestination,
	} {
		keys := make(chan string, 1)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			keys <- r.Header.Get(forwarder.IdempotencyKey)
			w.WriteHeader(status)
		}))
		publisher, err := newPublisher(server.URL)
		require.NoError(t, err)
		msg := message.NewMessage("uuid", []byte("payload"))
		msg.Metadata.Set(forwarder.IdempotencyKey, "1-17")
		err = publisher.Publish("orders", msg)
		require.ErrorIs(t, err, statusError(status))
		require.Equal(t, fault, classify(err), status)
		require.Equal(t, "1-17", <-keys)

		server.Close()
		err = publisher.Publish("orders", msg)
		require.Error(t, err)
		require.Equal(t, forwarder.FaultDestination, classify(err))
		require.NoError(t, publisher.Close())
	}
}
