package forwarder

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// What is wrong with a Config is known before anything runs, and names the field.
func TestConfigErrors(t *testing.T) {
	t.Parallel()

	one := []Destination{{Publisher: newBroker(nil)}}
	two := []Destination{{Name: "a", Publisher: newBroker(nil)}, {Name: "b", Publisher: newBroker(nil)}}
	with := func(change func(d *Destination)) Config {
		d := Destination{Name: "a", Publisher: newBroker(nil)}
		change(&d)
		return Config{Source: storing(), Destinations: []Destination{d}}
	}
	subscriber := &fakeSubscriber{}
	for name, test := range map[string]struct {
		config             Config
		destination, field string
	}{
		"no source":           {Config{Destinations: one}, "", "Source"},
		"no destination":      {Config{Source: storing()}, "", "Destinations"},
		"negative batch":      {Config{Source: storing(), Destinations: one, BatchSize: -1}, "", "BatchSize"},
		"large batch":         {Config{Source: storing(), Destinations: one, BatchSize: 10_001}, "", "BatchSize"},
		"negative close":      {Config{Source: storing(), Destinations: one, CloseTimeout: -1}, "", "CloseTimeout"},
		"nil middleware":      {Config{Source: storing(), Destinations: one, Middlewares: []message.HandlerMiddleware{nil}}, "", "Middlewares"},
		"same name":           {Config{Source: storing(), Destinations: append(one, one...)}, "default", "Name"},
		"no publisher":        {with(func(d *Destination) { d.Publisher = nil }), "a", "Publisher"},
		"deduplicate by":      {with(func(d *Destination) { d.DeduplicateBy = "what" }), "a", "DeduplicateBy"},
		"negative in flight":  {with(func(d *Destination) { d.MaxInFlight = -1 }), "a", "MaxInFlight"},
		"too many in flight":  {with(func(d *Destination) { d.MaxInFlight = 10_001 }), "a", "MaxInFlight"},
		"negative timeout":    {with(func(d *Destination) { d.PublishTimeout = -time.Second }), "a", "PublishTimeout"},
		"negative failures":   {with(func(d *Destination) { d.Failures = -1 }), "a", "Failures"},
		"negative backoff":    {with(func(d *Destination) { d.MinBackoff = -1 }), "a", "MinBackoff"},
		"backoff":             {with(func(d *Destination) { d.MinBackoff, d.MaxBackoff = 2, 1 }), "a", "MaxBackoff"},
		"template":            {with(func(d *Destination) { d.Topic = "{what}" }), "a", "Topic"},
		"envelope topic":      {with(func(d *Destination) { d.EnvelopeTopic = "\xff" }), "a", "EnvelopeTopic"},
		"poison topic":        {with(func(d *Destination) { d.PoisonTopic = "a\x00" }), "a", "PoisonTopic"},
		"no consumer":         {Config{Source: FromOutbox(nil, outbox.SubscriberConfig{}, outbox.AllTopics()), Destinations: one}, "", "Source"},
		"no subscriber":       {Config{Source: FromSubscriber(nil, "t"), Destinations: one}, "", "Source"},
		"no function":         {Config{Source: FromSubscribers(nil, "t"), Destinations: one}, "", "Source"},
		"no topics":           {Config{Source: FromSubscriber(subscriber), Destinations: one}, "", "Source"},
		"empty topic":         {Config{Source: FromSubscriber(subscriber, ""), Destinations: one}, "", "Source"},
		"topic twice":         {Config{Source: FromSubscriber(subscriber, "t", "t"), Destinations: one}, "", "Source"},
		"one for two":         {Config{Source: FromSubscriber(subscriber, "t"), Destinations: two}, "", "Source"},
		"stored id elsewhere": {Config{Source: FromSubscriber(subscriber, "t"), Destinations: []Destination{{Name: "a", Publisher: newBroker(nil), DeduplicationKey: "k"}}}, "a", "DeduplicateBy"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			_, err := New(test.config, nil)
			var wrong *ConfigError
			require.ErrorAs(t, err, &wrong)
			require.Equal(t, test.destination, wrong.Destination)
			require.Equal(t, test.field, wrong.Field)
			require.NotEmpty(t, wrong.Problem)
			require.Contains(t, err.Error(), "forwarder: ")
			require.Contains(t, err.Error(), test.field)
		})
	}
	require.Empty(t, subscriber.topics)

	// What is configured stays the caller's.
	destinations := []Destination{{Publisher: newBroker(nil)}}
	_, err := New(Config{Source: storing(), Destinations: destinations}, nil)
	require.NoError(t, err)
	require.Equal(t, "", destinations[0].Name)
}

func TestTemplates(t *testing.T) {
	t.Parallel()

	for text, want := range map[string]string{
		"{topic}":                         "orders",
		"fixed":                           "fixed",
		"a.{topic}.b":                     "a.orders.b",
		"{topic}-{key}":                   "orders-k",
		"{metadata:region}.{topic}":       "eu.orders",
		"{topic}{topic}{metadata:region}": "ordersorderseu",
	} {
		parsed, err := parseTemplate(text)
		require.NoError(t, err, text)
		got, err := parsed.topic("orders", "k", message.Metadata{"region": "eu"})
		require.NoError(t, err, text)
		require.Equal(t, want, got)
	}
	for _, text := range []string{"{", "}", "{topic", "topic}", "{what}", "{metadata:}", "{}", "{{topic}}", "a}b{topic}"} {
		_, err := parseTemplate(text)
		require.Error(t, err, text)
	}
	for _, text := range []string{"{key}", "a.{metadata:none}", "{metadata:bad}"} {
		parsed, err := parseTemplate(text)
		require.NoError(t, err, text)
		_, err = parsed.topic("orders", "", message.Metadata{"bad": "\xff"})
		require.ErrorIs(t, err, ErrInvalidTopic, text)
	}
}
