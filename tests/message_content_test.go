package tests

import (
	"bytes"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A payload that is nil and one that is empty are two things, and come as they
// were sent; metadata is never nil, since handlers write into it.
func TestMessageContent(t *testing.T) {
	t.Parallel()

	large := make([]byte, 3<<20)
	_, err := rand.Read(large)
	require.NoError(t, err)
	var every []byte
	for i := range 256 {
		every = append(every, byte(i))
	}
	sent := []*message.Message{
		withMetadata("nil", nil, nil),
		withMetadata("empty", []byte{}, message.Metadata{}),
		withMetadata("every byte", every, message.Metadata{"": "", "a": "", "\x01\x7f": "\x02"}),
		withMetadata("", []byte("without a uuid"), message.Metadata{"quotes": `"'\`, "ünïcödé \U0001F4EE": " \n\t"}),
		withMetadata("large", large, message.Metadata{"large": strings.Repeat("0123456789", 50_000)}),
		withMetadata("same", []byte("uuid"), nil),
		withMetadata("same", []byte("uuid"), nil),
	}
	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	for group, config := range map[string]outbox.SubscriberConfig{
		"one page": {}, "by rows": {PageSize: 1}, "by bytes": {PageBytes: 1}, "by some bytes": {PageBytes: 1000},
	} {
		config.ConsumerGroup = group
		_, messages := f.subscribe(f.consumer(nil), config, "topic")
		for i, got := range receive(t, messages, len(sent)) {
			want := sent[i]
			require.Equal(t, want.UUID, got.UUID, "%s, message %d", group, i)
			require.Equal(t, want.Payload == nil, got.Payload == nil, "%s, message %d", group, i)
			require.True(t, bytes.Equal(want.Payload, got.Payload), "%s, message %d", group, i)
			require.NotNil(t, got.Metadata)
			require.Len(t, got.Metadata, len(want.Metadata))
			for key, value := range want.Metadata {
				require.Equal(t, value, got.Metadata[key], "%s, message %d, key %q", group, i, key)
			}
		}
	}
}

// A row that finds no partition of its own goes into the DEFAULT one, and is
// delivered from there like any other, in its place.
func TestMessagesOutsideThePartitions(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 2}, "topic")
	want := []string{"1", "2", "3", "4", "5"}
	for i, at := range []string{"now()", "now() + interval '10 years'", "now() - interval '10 years'", "'infinity'", "now()"} {
		f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('topic', $1, "+at+")", want[i])
	}
	require.Equal(t, 3, f.number("SELECT count(*)::int FROM outbox.messages_default"))
	require.Equal(t, want, uuids(receive(t, messages, len(want))))
	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "later", PageSize: 2}, "topic")
	require.Equal(t, want, uuids(receive(t, messages, len(want))))
}
