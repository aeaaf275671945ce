package tests

import (
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

func TestSubscribeDeliversInOrder(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(2500)
	require.NoError(t, publisher.Publish("orders", sent[:2000]...))
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 300}, "orders")
	require.Equal(t, uuids(sent[:2000]), uuids(receive(t, messages, 2000)))

	for _, msg := range sent[2000:] {
		require.NoError(t, publisher.Publish("orders", msg))
	}
	require.Equal(t, uuids(sent[2000:]), uuids(receive(t, messages, 500)))
}
