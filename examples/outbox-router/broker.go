package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

const (
	// maxSize is what the stream takes, in bytes, header included.
	maxSize = 1000
	// answerTimeout is how long the broker may take to start, and to confirm.
	answerTimeout = 5 * time.Second
)

// broker is a NATS server in this process with a stream for the topic. An application
// has one elsewhere.
type broker struct {
	options *server.Options
	server  *server.Server // nil while it is down
}

// startBroker starts a server on any port and makes the stream.
func startBroker() (_ *broker, err error) {
	folder, err := os.MkdirTemp("", "outbox-router.")
	if err != nil {
		return nil, err
	}
	b := &broker{options: &server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: folder, NoLog: true, NoSigs: true,
	}}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if err := b.start(); err != nil {
		return nil, err
	}
	return b, b.do(func(js nats.JetStreamContext) error {
		_, err := js.AddStream(&nats.StreamConfig{Name: topic, Subjects: []string{topic}, MaxMsgSize: maxSize})
		return err
	})
}

// start starts the server, on the port that it had before.
func (b *broker) start() error {
	s, err := server.NewServer(b.options)
	if err != nil {
		return err
	}
	s.Start()
	b.server = s
	if !s.ReadyForConnections(answerTimeout) {
		return fmt.Errorf("the broker is not ready after %s", answerTimeout)
	}
	return nil
}

// stop ends the server and keeps its data.
func (b *broker) stop() {
	if b.server != nil {
		b.server.Shutdown()
		b.server.WaitForShutdown()
		b.server = nil
	}
}

// close ends the server and removes its data.
func (b *broker) close() error {
	b.stop()
	return os.RemoveAll(b.options.StoreDir)
}

func (b *broker) url() string { return fmt.Sprintf("nats://%s:%d", b.options.Host, b.options.Port) }

// publisher returns a publisher that waits for the stream's confirmation.
func (b *broker) publisher(logger watermill.LoggerAdapter) (message.Publisher, error) {
	return wmnats.NewPublisher(wmnats.PublisherConfig{
		URL: b.url(),
		NatsOptions: []nats.Option{
			nats.MaxReconnects(-1), nats.ReconnectWait(10 * time.Millisecond),
			// By default what is published while the broker is away is reported as
			// failed after a while, and sent all the same later.
			nats.ReconnectBufSize(-1),
		},
		JetStream: wmnats.JetStreamConfig{
			ConnectOptions: []nats.JSOpt{nats.MaxWait(answerTimeout)},
			// The stream drops a message whose UUID it has had within two minutes: one
			// whose confirmation was lost. Leave it out if UUIDs are not unique.
			TrackMsgId: true,
		},
	}, logger)
}

// stored returns what is in the stream, in its order.
func (b *broker) stored(ctx context.Context) (list []order, err error) {
	err = b.do(func(js nats.JetStreamContext) error {
		info, err := js.StreamInfo(topic, nats.Context(ctx))
		if err != nil {
			return err
		}
		for sequence := info.State.FirstSeq; sequence <= info.State.LastSeq; sequence++ {
			raw, err := js.GetMsg(topic, sequence, nats.Context(ctx))
			if err != nil {
				return err
			}
			o, err := parseOrder(raw.Data)
			if err != nil {
				return err
			}
			list = append(list, o)
		}
		return nil
	})
	return list, err
}

// do calls do with a connection of its own.
func (b *broker) do(do func(nats.JetStreamContext) error) error {
	conn, err := nats.Connect(b.url())
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := conn.JetStream()
	if err != nil {
		return err
	}
	return do(js)
}
