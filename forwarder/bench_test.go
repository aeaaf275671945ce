package forwarder

import (
	"context"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// BenchmarkForward is what a message costs here, between a source and a publisher
// that do nothing: 64 lines, with batches of so many.
func BenchmarkForward(b *testing.B) {
	for name, publisher := range map[string]message.Publisher{"one by one": takesAll{}, "batches": takesBatches{}} {
		for _, size := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s of lines of %d", name, size), func(b *testing.B) {
				b.ReportAllocs()
				source := &endless{n: b.N, size: size, lines: DefaultMaxInFlight}
				f, err := New(Config{Source: source, Destinations: []Destination{{Publisher: publisher}}}, nil)
				if err != nil {
					b.Fatal(err)
				}
				if err := f.Run(b.Context()); err != nil {
					b.Fatal(err)
				}
				if n := f.Status().Destinations[0].Published; n < int64(b.N) {
					b.Fatalf("%d of %d messages", n, b.N)
				}
			})
		}
	}
}

// takesAll is a publisher that takes everything.
type takesAll struct{}

func (takesAll) Publish(string, ...*message.Message) error { return nil }

func (takesAll) Close() error { return nil }

// takesBatches does so in batches.
type takesBatches struct{ takesAll }

func (takesBatches) PublishBatch([]Outgoing) []error { return nil }

// endless is a source and a feed of n messages, in batches of so many, with so many
// lines in flight.
type endless struct {
	n, size, lines int
}

func (s *endless) validate(Config) error { return nil }

func (s *endless) open(settings, watermill.LoggerAdapter) (feed, error) { return s, nil }

func (s *endless) subscribe(ctx context.Context) (<-chan []*message.Message, error) {
	out := make(chan []*message.Message)
	go func() {
		defer close(out)
		free := make(chan struct{}, s.lines)
		for sent := 0; sent < s.n; sent += s.size {
			batch := make([]*message.Message, s.size)
			for i := range batch {
				batch[i] = message.NewMessage("a UUID", nil)
				batch[i].Metadata = message.Metadata{"correlation_id": "1", "event_name": "order.placed", "partition_key": "1"}
				batch[i].SetContext(ctx)
			}
			free <- struct{}{}
			out <- batch
			go func() {
				for _, msg := range batch {
					<-msg.Acked()
				}
				<-free
			}()
		}
		for range s.lines {
			free <- struct{}{}
		}
	}()
	return out, nil
}

func (s *endless) origin(*message.Message) origin { return origin{topic: "t", key: "k", number: 1} }

func (s *endless) fail(*consumed, error, bool) bool { return false }

func (s *endless) again(*consumed, error) bool { return false }

func (s *endless) leave(*consumed) {}

func (s *endless) close() error { return nil }
