// Package webhook is an HTTP server in this process that takes messages as requests,
// for tests. A topic is a path. What it has answered with 2xx is received; it is
// kept in memory, over Kill too.
//
// What the publisher does when something is wrong, with the settings of
// [NewPublisher]:
//
//   - the server is away, a connection is cut, an answer does not come: *url.Error,
//     whose Timeout tells the last one from the others. net/http repeats no POST that
//     it may have sent;
//   - the server answers with 400 or more: watermill-http's ErrErrorResponse, with the
//     status in the text of the error and nowhere else.
package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmhttp "github.com/ThreeDotsLabs/watermill-http/v2/pkg/http"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// maxBody is what the server takes, in bytes.
const maxBody = 1 << 20

// Broker is an HTTP server.
type Broker struct {
	*brokertest.Base

	addr string

	mu       sync.Mutex
	server   *http.Server // nil while it is down
	served   chan struct{}
	received map[string][]*message.Message
	respond  func(topic string, msg *message.Message) int
	refused  map[string]bool
}

var _ brokertest.Broker = (*Broker)(nil)

// Start starts a server on a free port. ctx governs the start alone. The caller calls
// Shutdown.
func Start(ctx context.Context) (*Broker, error) {
	ports, err := brokertest.FreePorts(ctx, 1)
	if err != nil {
		return nil, err
	}
	b := &Broker{addr: brokertest.Local(ports[0]), received: map[string][]*message.Message{}, refused: map[string]bool{}}
	b.Base, err = brokertest.NewBase(ctx, b.addr, brokertest.Engine{
		Start: b.start, Kill: func(context.Context) error { return b.kill() },
		Remove: func() error {
			if err := b.kill(); !errors.Is(err, brokertest.ErrDown) {
				return err
			}
			return nil
		},
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Name implements [brokertest.Broker].
func (b *Broker) Name() string { return "webhook" }

// Respond makes the server ask respond for the status of each answer from now on; nil
// is 200 for all. It is called from many goroutines and may block.
func (b *Broker) Respond(respond func(topic string, msg *message.Message) int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.respond = respond
}

// Publisher implements [brokertest.Broker].
func (b *Broker) Publisher(logger watermill.LoggerAdapter) (message.Publisher, error) {
	return NewPublisher("http://"+b.Proxy().Addr(), logger)
}

// NewPublisher returns a publisher of POST requests to url, with the topic as their
// path. It waits for the answer to each. The end of the message's context ends that.
func NewPublisher(url string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	transport := &http.Transport{MaxIdleConnsPerHost: 8}
	inner, err := wmhttp.NewPublisher(wmhttp.PublisherConfig{
		Client: &http.Client{Timeout: brokertest.PublishTimeout, Transport: transport},
		MarshalMessageFunc: func(topic string, msg *message.Message) (*http.Request, error) {
			request, err := wmhttp.DefaultMarshalMessageFunc(url+"/"+topic, msg)
			if err != nil {
				return nil, err
			}
			return request.WithContext(msg.Context()), nil
		},
	}, brokertest.OrNop(logger))
	if err != nil {
		return nil, err
	}
	return publisher{inner, transport}, nil
}

// publisher closes its connections, too.
type publisher struct {
	message.Publisher
	transport *http.Transport
}

func (p publisher) Close() error {
	err := p.Publisher.Close()
	p.transport.CloseIdleConnections()
	return err
}

// Address implements [brokertest.Broker].
func (b *Broker) Address() string { return "http://" + b.addr }

// Connect returns a publisher to the broker at an Address.
func Connect(address string, logger watermill.LoggerAdapter) (message.Publisher, error) {
	return NewPublisher(address, logger)
}

// MaxPayload implements [brokertest.Broker].
func (b *Broker) MaxPayload() int { return maxBody }

// Declare implements [brokertest.Broker]. The server takes any topic that it does not
// refuse.
func (b *Broker) Declare(_ context.Context, topics ...string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, topic := range topics {
		delete(b.refused, topic)
	}
	return nil
}

// Refuse implements [brokertest.Broker]: the answer is 422, until Declare.
func (b *Broker) Refuse(_ context.Context, topic string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refused[topic] = true
	delete(b.received, topic)
	return nil
}

// Received implements [brokertest.Broker].
func (b *Broker) Received(_ context.Context, topic string) ([]*message.Message, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var messages []*message.Message
	for _, msg := range b.received[topic] {
		messages = append(messages, msg.Copy())
	}
	return messages, nil
}

// ServeHTTP takes one message.
func (b *Broker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	payload, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		return
	}
	msg := message.NewMessage(r.Header.Get(wmhttp.HeaderUUID), payload)
	if err := json.Unmarshal([]byte(r.Header.Get(wmhttp.HeaderMetadata)), &msg.Metadata); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	topic := strings.TrimPrefix(r.URL.Path, "/")
	b.mu.Lock()
	respond, refused := b.respond, b.refused[topic]
	b.mu.Unlock()
	status := http.StatusOK
	switch {
	case refused:
		status = http.StatusUnprocessableEntity
	case respond != nil:
		status = respond(topic, msg)
	}
	if status/100 == 2 {
		b.mu.Lock()
		b.received[topic] = append(b.received[topic], msg)
		b.mu.Unlock()
	}
	w.WriteHeader(status)
}

func (b *Broker) start(ctx context.Context) error {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", b.addr)
	if err != nil {
		return fmt.Errorf("webhook: listen: %w", err)
	}
	s := &http.Server{Handler: b, ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(listener) // until Close
	}()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.server, b.served = s, served
	return nil
}

func (b *Broker) kill() error {
	b.mu.Lock()
	s, served := b.server, b.served
	b.server = nil
	b.mu.Unlock()
	if s == nil {
		return brokertest.ErrDown
	}
	err := s.Close()
	<-served
	return err
}
