package main

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/millrace/watermill-outbox/forwarder"
)

// statusError is the answer of a server that does not take a message. The error of
// watermill-http has the status in its text and nowhere else.
type statusError int

func (s statusError) Error() string {
	return fmt.Sprintf("the server answered %d %s", int(s), http.StatusText(int(s)))
}

// refusals makes errors of answers, for the publisher alone: a RoundTripper for anyone
// must not.
type refusals struct{ http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (r refusals) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.RoundTripper.RoundTrip(request)
	if err != nil || response.StatusCode < http.StatusBadRequest {
		return response, err
	}
	return nil, errors.Join(statusError(response.StatusCode), response.Body.Close())
}

// classify knows the statuses that say that a message is wrong. All others are of the
// server: it is busy, in trouble, or does not know us. Without one the server gave no
// answer, and forwarder.Classify sees why.
func classify(err error) forwarder.Fault {
	var status statusError
	if !errors.As(err, &status) {
		return forwarder.Classify(err)
	}
	switch int(status) {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity:
		return forwarder.FaultPermanent
	}
	return forwarder.FaultDestination
}
