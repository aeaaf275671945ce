package main

import (
	"net/http"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmhttp "github.com/ThreeDotsLabs/watermill-http/v2/pkg/http"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/forwarder"
)

const (
	// answerTimeout is how long the server may take to answer.
	answerTimeout = 5 * time.Second
	// maxRequests is how many requests the server gets at the same time.
	maxRequests = 8
)

// publisher closes its connections, too.
type publisher struct {
	message.Publisher
	connections *http.Transport
}

// newPublisher returns a publisher of POST requests to the server, with the topic as
// their path, that waits for the answer to each. The context of a message ends the wait.
func newPublisher(url string) (message.Publisher, error) {
	// By default two connections are kept, and each request beyond makes one of its own.
	connections := &http.Transport{MaxIdleConnsPerHost: maxRequests}
	inner, err := wmhttp.NewPublisher(wmhttp.PublisherConfig{
		Client: &http.Client{Timeout: answerTimeout, Transport: refusals{connections}},
		MarshalMessageFunc: func(topic string, msg *message.Message) (*http.Request, error) {
			request, err := wmhttp.DefaultMarshalMessageFunc(url+"/"+topic, msg)
			if err != nil {
				return nil, err
			}
			// All metadata are in one header of Watermill's, which others do not read.
			request.Header.Set(forwarder.IdempotencyKey, msg.Metadata.Get(forwarder.IdempotencyKey))
			return request.WithContext(msg.Context()), nil
		},
	}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	return publisher{inner, connections}, nil
}

// Close closes the publisher and its connections.
func (p publisher) Close() error {
	err := p.Publisher.Close()
	p.connections.CloseIdleConnections()
	return err
}
