package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Every field of a Subscriber's configuration, with what it refuses.
func TestSubscriberConfigIsChecked(t *testing.T) {
	t.Parallel()

	cases := map[string]struct {
		config outbox.SubscriberConfig
		says   []string
	}{
		"group too long":     {outbox.SubscriberConfig{ConsumerGroup: strings.Repeat("g", outbox.MaxConsumerGroupBytes+1)}, []string{"ConsumerGroup", "1025", "1024"}},
		"group with a NUL":   {outbox.SubscriberConfig{ConsumerGroup: "a\x00b"}, []string{"ConsumerGroup", "NUL"}},
		"group not UTF-8":    {outbox.SubscriberConfig{ConsumerGroup: "a\xff"}, []string{"ConsumerGroup", "UTF-8"}},
		"unknown start":      {outbox.SubscriberConfig{StartFrom: "somewhere"}, []string{"StartFrom", "earliest", "latest", "somewhere"}},
		"negative page":      {outbox.SubscriberConfig{PageSize: -1}, []string{"PageSize", "is -1"}},
		"page too large":     {outbox.SubscriberConfig{PageSize: outbox.MaxPageSize + 1}, []string{"PageSize", "100000", "100001"}},
		"negative bytes":     {outbox.SubscriberConfig{PageBytes: -1}, []string{"PageBytes", "is -1"}},
		"too many bytes":     {outbox.SubscriberConfig{PageBytes: outbox.MaxPageBytes + 1}, []string{"PageBytes"}},
		"negative backoff":   {outbox.SubscriberConfig{Retry: outbox.RetryConfig{MinBackoff: -1}}, []string{"Retry.MinBackoff"}},
		"backoffs reversed":  {outbox.SubscriberConfig{Retry: outbox.RetryConfig{MinBackoff: time.Second, MaxBackoff: time.Millisecond}}, []string{"Retry.MaxBackoff", "1ms", "1s"}},
		"negative longest":   {outbox.SubscriberConfig{Retry: outbox.RetryConfig{MaxBackoff: -1}}, []string{"Retry.MaxBackoff"}},
		"longest below 0.1s": {outbox.SubscriberConfig{Retry: outbox.RetryConfig{MaxBackoff: time.Millisecond}}, []string{"Retry.MaxBackoff", "1ms", "100ms"}},
	}
	f := newFixture(t)
	consumer := f.consumer(nil)
	for name, c := range cases {
		subscriber, err := outbox.NewSubscriber(consumer, c.config, nil)
		require.Nil(t, subscriber, name)
		require.ErrorContains(t, err, "outbox: SubscriberConfig.", name)
		for _, text := range c.says {
			require.ErrorContains(t, err, text, name)
		}
	}
	_, err := outbox.NewSubscriber(nil, outbox.SubscriberConfig{}, nil)
	require.ErrorContains(t, err, "Consumer")

	// At the bounds, and beyond a default that another field moves.
	for _, config := range []outbox.SubscriberConfig{
		{PageSize: 1, PageBytes: 1, CloseTimeout: -1, Retry: outbox.RetryConfig{MinBackoff: 1, MaxBackoff: 1}},
		{PageSize: outbox.MaxPageSize, PageBytes: outbox.MaxPageBytes, CloseTimeout: time.Hour, Retry: outbox.RetryConfig{MinBackoff: time.Hour}},
	} {
		subscriber, err := outbox.NewSubscriber(consumer, config, nil)
		require.NoError(t, err)
		require.NoError(t, subscriber.Close())
	}
}

// A topic that cannot be stored is refused before any statement.
func TestSubscribeChecksItsTopic(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	subscriber, err := outbox.NewSubscriber(f.consumer(nil), outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	for topic, says := range map[string]string{
		"": "empty", "a\x00": "NUL", "\xff": "UTF-8", strings.Repeat("t", outbox.MaxTopicBytes+1): "1025",
	} {
		messages, err := subscriber.Subscribe(t.Context(), topic)
		require.Nil(t, messages)
		require.ErrorIs(t, err, outbox.ErrInvalidTopic)
		require.ErrorContains(t, err, says)
		require.ErrorIs(t, subscriber.SubscribeInitialize(topic), outbox.ErrInvalidTopic)
	}
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.cursors"))
}
