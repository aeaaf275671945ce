package tests

import (
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// forwardKind is a way to forward: to a kind of broker, one by one or in batches.
type forwardKind struct {
	brokerKind

	// publisher returns one through the broker's proxy, until the test ends.
	publisher func(*testing.T, brokertest.Broker) message.Publisher
	// deduplication is the Destination's DeduplicationKey: with one the broker has
	// nothing twice.
	deduplication string
}

func forwardKinds() []forwardKind {
	var kinds []forwardKind
	for _, kind := range brokerKinds {
		one := forwardKind{brokerKind: kind, publisher: brokerPublisher}
		if kind.name == "jetstream" {
			one.deduplication = forwarder.NATSMessageID
			batches := one
			batches.name += " batches"
			batches.connect = connectBatches
			batches.publisher = func(t *testing.T, b brokertest.Broker) message.Publisher {
				return batchPublisher(t, "nats://"+b.Proxy().Addr())
			}
			kinds = append(kinds, batches)
		}
		kinds = append(kinds, one)
	}
	return kinds
}

// tap is between a Forwarder and a publisher. It sees what is asked of the publisher
// and what becomes of it. Its functions are set before, and called concurrently.
type tap struct {
	message.Publisher

	// before, unless nil, is called before a message is published. It may block; the
	// publisher is not asked if it returns an error.
	before func(topic string, msg *message.Message) error
	// after, unless nil, may make another error of a failure.
	after func(topic string, err error) error

	mu sync.Mutex
	// asked counts the calls for each message, taken those that returned nil, failed
	// those of a topic that did not.
	asked, taken, failed map[string]int
}

// batchTap is a tap before a publisher of batches.
type batchTap struct {
	*tap

	batches forwarder.BatchPublisher
}

var _ forwarder.BatchPublisher = batchTap{}

func newTap(publisher message.Publisher) *tap {
	return &tap{Publisher: publisher, asked: map[string]int{}, taken: map[string]int{}, failed: map[string]int{}}
}

// publisher returns the tap as the kind of publisher that it is before.
func (p *tap) publisher() message.Publisher {
	if batches, ok := p.Publisher.(forwarder.BatchPublisher); ok {
		return batchTap{p, batches}
	}
	return p
}

func (p *tap) begin(topic string, msg *message.Message) error {
	p.mu.Lock()
	p.asked[msg.UUID]++
	p.mu.Unlock()
	if p.before != nil {
		return p.before(topic, msg)
	}
	return nil
}

func (p *tap) end(topic string, msg *message.Message, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.taken[msg.UUID]++
		return nil
	}
	p.failed[topic]++
	if p.after != nil {
		return p.after(topic, err)
	}
	return err
}

func (p *tap) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		err := p.begin(topic, msg)
		if err == nil {
			err = p.Publisher.Publish(topic, msg)
		}
		if err = p.end(topic, msg, err); err != nil {
			return err
		}
	}
	return nil
}

func (p batchTap) PublishBatch(batch []forwarder.Outgoing) []error {
	errs := make([]error, len(batch))
	var passed []forwarder.Outgoing
	var places []int
	for i, out := range batch {
		if errs[i] = p.begin(out.Topic, out.Message); errs[i] == nil {
			passed, places = append(passed, out), append(places, i)
		}
	}
	if len(passed) > 0 {
		if results := p.batches.PublishBatch(passed); results != nil {
			for i, place := range places {
				errs[place] = results[i]
			}
		}
	}
	for i, out := range batch {
		errs[i] = p.end(out.Topic, out.Message, errs[i])
	}
	return errs
}

// calls returns how often the publisher was asked for a message.
func (p *tap) calls(msg *message.Message) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked[msg.UUID]
}

// allCalls returns how often it was asked for any.
func (p *tap) allCalls() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, calls := range p.asked {
		n += calls
	}
	return n
}

// failures returns how often it failed for a topic.
func (p *tap) failures(topic string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed[topic]
}

// missing returns how many of the messages it never took.
func (p *tap) missing(messages []*message.Message) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, msg := range messages {
		if p.taken[msg.UUID] == 0 {
			n++
		}
	}
	return n
}

// relay is an outbox and a broker of each kind to forward it to.
type relay struct {
	*fixture

	ends []*end
	// logger is the Forwarder's, and so that of its subscriptions.
	logger watermill.LoggerAdapter
}

// end is where a relay forwards to.
type end struct {
	forwardKind

	broker brokertest.Broker
	tap    *tap
	// destination may be changed before the relay runs.
	destination forwarder.Destination
}

// newRelay has brokers with these topics, which have no other users but that other
// tests use the same server of RabbitMQ.
func newRelay(t *testing.T, topics ...string) *relay {
	t.Helper()
	return newRelayOf(t, newFixture(t), topics...)
}

func newRelayOf(t *testing.T, f *fixture, topics ...string) *relay {
	t.Helper()
	r := &relay{fixture: f, logger: testLogger(t)}
	for _, kind := range forwardKinds() {
		e := &end{forwardKind: kind, broker: newBroker(t, kind.open)}
		require.NoError(t, e.broker.Declare(t.Context(), topics...))
		e.tap = newTap(kind.publisher(t, e.broker))
		e.destination = forwarder.Destination{
			Name: kind.name, Publisher: e.tap.publisher(), DeduplicationKey: kind.deduplication,
			MinBackoff: 10 * time.Millisecond, MaxBackoff: 200 * time.Millisecond,
		}
		r.ends = append(r.ends, e)
	}
	return r
}

// outage says that what fails is the brokers' fault, where a test makes them fail: of some
// errors nobody knows it, and there are those who fail in parts. When three calls have
// failed sarama refuses a partition for ten seconds ("circuit breaker is open"), while
// others take messages, which proves that the broker is up.
func (r *relay) outage() {
	for _, e := range r.ends {
		e.destination.Classify = faulty
	}
}

// destinations returns those of all ends.
func (r *relay) destinations() []forwarder.Destination {
	var list []forwarder.Destination
	for _, e := range r.ends {
		list = append(list, e.destination)
	}
	return list
}

// run runs a Forwarder from everything in the outbox to all ends until stop is called.
func (r *relay) run(t *testing.T, consumer *outbox.Consumer, change func(*forwarder.Config)) (running *forwarder.Forwarder, stop func()) {
	t.Helper()
	config := forwarder.Config{
		Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{
			Retry: outbox.RetryConfig{MinBackoff: time.Millisecond, MaxBackoff: 10 * time.Millisecond},
		}, outbox.AllTopics()),
		Destinations: r.destinations(),
	}
	if change != nil {
		change(&config)
	}
	return runForwarder(t, config, r.logger)
}

func (r *relay) publish(t *testing.T, topic string, messages ...*message.Message) {
	t.Helper()
	require.NoError(t, r.publisher(outbox.PublisherConfig{}).Publish(topic, messages...))
}

// awaitTaken waits until the publishers of all ends, but those, have taken the messages.
func (r *relay) awaitTaken(t *testing.T, messages []*message.Message, but ...*end) {
	t.Helper()
	for _, e := range r.ends {
		if !slices.Contains(but, e) {
			e.awaitTaken(t, messages)
		}
	}
}

func (e *end) awaitTaken(t *testing.T, messages []*message.Message) {
	t.Helper()
	require.Eventually(t, func() bool { return e.tap.missing(messages) == 0 }, 2*waitFor, 5*time.Millisecond, "%s does not have all", e.name)
}

// requireOnce checks that the topic has the messages as they were, each key in order,
// and nothing twice.
func (e *end) requireOnce(t *testing.T, topic string, messages []*message.Message) {
	t.Helper()
	require.Zero(t, requireInBroker(t, e.broker, topic, messages), "%s: duplicates", e.name)
}

// received returns what the broker has of a topic.
func (e *end) received(t *testing.T, topic string) []*message.Message {
	t.Helper()
	messages, err := e.broker.Received(t.Context(), topic)
	require.NoError(t, err)
	return messages
}

// group is the consumer group of an end.
func (e *end) group() string { return forwarder.DefaultConsumerGroup + "." + e.name }

// letters returns the dead letters of an end by their UUIDs.
func (r *relay) letters(t *testing.T, e *end) map[string]outbox.DeadLetter {
	t.Helper()
	letters := map[string]outbox.DeadLetter{}
	for _, letter := range allDeadLetters(t, r.deadLetters(nil), outbox.DeadLetterFilter{ConsumerGroup: e.group()}, 100) {
		require.NotContains(t, letters, letter.UUID, "%s: it is there twice", e.name)
		letters[letter.UUID] = letter
	}
	return letters
}

// awaitLetters waits until an end has so many dead letters.
func (r *relay) awaitLetters(t *testing.T, e *end, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		var dead int
		err := r.pool.QueryRow(t.Context(), r.sql("SELECT count(*)::int FROM outbox.dead_letters WHERE consumer_group = $1"), e.group()).Scan(&dead)
		return err == nil && dead >= n
	}, 2*waitFor, 10*time.Millisecond, "%s: not %d dead letters", e.name, n)
}

// requireNoLetters checks that nothing was given up.
func (r *relay) requireNoLetters(t *testing.T) {
	t.Helper()
	require.Zero(t, r.number("SELECT count(*)::int FROM outbox.dead_letters"))
}

// requireLetter checks that a dead letter is the message that died.
func requireLetter(t *testing.T, want *message.Message, letter outbox.DeadLetter, attempts int, reason string) {
	t.Helper()
	require.Equal(t, want.UUID, letter.UUID)
	require.Equal(t, []byte(want.Payload), letter.Payload)
	require.Contains(t, letter.Error, reason)
	require.Equal(t, attempts, letter.Attempts, letter.Error)
	metadata := maps.Clone(letter.Metadata)
	maps.DeleteFunc(metadata, func(key, _ string) bool { _, its := want.Metadata[key]; return !its })
	require.Equal(t, want.Metadata, metadata)
}

// without returns the messages but some.
func without(messages []*message.Message, some ...*message.Message) []*message.Message {
	return slices.DeleteFunc(slices.Clone(messages), func(msg *message.Message) bool { return slices.Contains(some, msg) })
}
