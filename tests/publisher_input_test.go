package tests

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// badUTF8 is no text in any encoding of a database that is UTF-8.
const badUTF8 = "\xff\xfe"

// Field cases F81, F82 and F86. What a text column cannot hold is an error of
// the server, and that error aborts the caller's transaction: the order is lost
// along with the message. So it is refused before anything is sent.
func TestPublishRefusesInputBeforeAnySQL(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("CREATE TABLE orders (id int)")
	pool, counter := f.countedPool(t)
	long := strings.Repeat("x", 1025)
	key := func(key string) message.Metadata { return message.Metadata{outbox.DefaultKeyMetadata: key} }
	for name, test := range map[string]struct {
		msg   *message.Message
		field string
	}{
		"nil":                       {nil, "message"},
		"uuid with NUL":             {message.NewMessage("a\x00b", nil), "uuid"},
		"uuid not UTF-8":            {message.NewMessage(badUTF8, nil), "uuid"},
		"uuid too long":             {message.NewMessage(long, nil), "uuid"},
		"metadata key with NUL":     {withMetadata("1", nil, message.Metadata{"a\x00": "b"}), "metadata"},
		"metadata value with NUL":   {withMetadata("1", nil, message.Metadata{"a": "\x00"}), "metadata"},
		"metadata key not UTF-8":    {withMetadata("1", nil, message.Metadata{badUTF8: "b"}), "metadata"},
		"metadata value not UTF-8":  {withMetadata("1", nil, message.Metadata{"a": badUTF8}), "metadata"},
		"metadata with a half rune": {withMetadata("1", nil, message.Metadata{"a": "é"[:1]}), "metadata"},
		"metadata with a surrogate": {withMetadata("1", nil, message.Metadata{"a": "\xed\xa0\x80"}), "metadata"},
		"metadata too large":        {withMetadata("1", nil, message.Metadata{"a": strings.Repeat("x", 1<<20)}), "metadata"},
		"metadata too large in sum": {withMetadata("1", nil, message.Metadata{"a": strings.Repeat("x", 600<<10), "b": strings.Repeat("x", 600<<10)}), "metadata"},
		"ordering key too long":     {withMetadata("1", nil, key(long)), "ordering key"},
		"payload too large":         {message.NewMessage("1", make([]byte, 1001)), "payload"},
		"to be delivered some time": {withMetadata("1", nil, message.Metadata{delay.DelayedUntilKey: "tomorrow"}), "metadata"},
		"delayed for some time":     {withMetadata("1", nil, message.Metadata{delay.DelayedForKey: "a while"}), "metadata"},
	} {
		t.Run(name, func(t *testing.T) {
			topic := "refused: " + name
			publisher := publisherOn(t, pool, outbox.PublisherConfig{MaxPayloadBytes: 1000})
			tx, err := pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(t.Context()) }()
			ctx := outbox.ContextWithTx(t.Context(), tx)
			_, err = tx.Exec(t.Context(), "INSERT INTO orders VALUES (1)")
			require.NoError(t, err)
			for _, n := range callSizes {
				// Nothing of the call is stored, not even what comes before.
				messages := newMessages(n)
				for _, msg := range messages {
					msg.SetContext(ctx)
				}
				index := n / 2
				messages[index] = test.msg
				before := counter.n.Load()
				err := publisher.Publish(topic, messages...)
				require.Equal(t, before, counter.n.Load())

				require.ErrorIs(t, err, outbox.ErrInvalidMessage)
				var invalid *outbox.MessageError
				require.ErrorAs(t, err, &invalid)
				require.Equal(t, topic, invalid.Topic)
				require.Equal(t, index, invalid.Index)
				require.Equal(t, test.field, invalid.Field)
				if test.msg != nil {
					require.Equal(t, test.msg.UUID, invalid.UUID)
				}
				require.ErrorContains(t, err, "message "+strconv.Itoa(index)+" ")
				require.Less(t, len(err.Error()), 2000, "an error is for reading")
			}
			accepted := newMessages(3)
			require.NoError(t, publishIn(t.Context(), publisher, tx, topic, accepted...))
			require.NoError(t, tx.Commit(t.Context()))
			f.requireStored(t, topic, accepted)
		})
	}
}

func delayed(d delay.Delay) *message.Message {
	msg := message.NewMessage("1", nil)
	delay.Message(msg, d)
	return msg
}

func TestPublishRefusesTopicsBeforeAnySQL(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	pool, counter := f.countedPool(t)
	publisher := publisherOn(t, pool, outbox.PublisherConfig{})
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	before := counter.n.Load()
	for name, topic := range map[string]string{
		"empty": "", "NUL": "a\x00", "not UTF-8": badUTF8,
		"1025 bytes": strings.Repeat("x", 1025), "2000 bytes": strings.Repeat("é", 1000),
	} {
		for _, n := range callSizes {
			err := publisher.Publish(topic, newMessages(n)...)
			require.ErrorIs(t, err, outbox.ErrInvalidTopic, name)
			require.Less(t, len(err.Error()), 2000, name)
		}
		_, err = subscriber.Subscribe(t.Context(), topic)
		require.ErrorIs(t, err, outbox.ErrInvalidTopic, name)
	}
	require.Equal(t, before, counter.n.Load())
	require.Zero(t, f.number("SELECT count(*) FROM outbox.messages"))
}

// A time that has come is no reason to wait. Both keys stay: the DelayOnError
// middleware reads them on the next failure.
func TestPublishWhatWasDueAlready(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := []*message.Message{
		delayed(delay.For(-time.Hour)),
		delayed(delay.Until(time.Unix(0, 0))),
		withMetadata("1", nil, message.Metadata{delay.DelayedUntilKey: "2001-02-03T04:05:06.789+05:30"}),
		withMetadata("1", nil, message.Metadata{delay.DelayedUntilKey: "", delay.DelayedForKey: "24h0m0s"}),
	}
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", sent...))
	f.requireStored(t, "orders", sent)
}

// Field case F83. A payload column of type JSON refused binary messages,
// reordered keys and rounded numbers. Bytes are bytes here; nil is stored as NULL
// and arrives as nil, and no bytes arrive as no bytes.
func TestPublishKeepsPayloadBytes(t *testing.T) {
	t.Parallel()

	random := make([]byte, 1<<20)
	source := rand.NewChaCha8([32]byte{1})
	_, _ = source.Read(random) // never fails
	f := newFixture(t)
	consumer := f.consumer(nil)
	publisher := f.publisher(outbox.PublisherConfig{})
	sql := publisherOn(t, openSQL(t, "postgres", f.url), outbox.PublisherConfig{})
	var sent []*message.Message
	for _, payload := range [][]byte{
		nil,
		{},
		[]byte("hello"), []byte(`"FIRST"`), []byte(`{"b":1,"a":1.0,"a":2}`), []byte("12345678901234567890"),
		[]byte(`{"a":"\u0000"}`),
		{0},
		{0, 0, 0},
		[]byte(`\x00`), []byte(`\`), []byte(badUTF8),
		{0x08, 0x96, 0x01, 0x12, 0x07, 't', 'e', 's', 't', 'i', 'n', 'g'}, // a protocol buffer
		random,
	} {
		sent = append(sent, message.NewMessage(strconv.Itoa(len(sent)), payload))
	}
	for _, p := range []*outbox.Publisher{publisher, sql} {
		for _, msg := range sent {
			require.NoError(t, p.Publish("one by one", msg))
		}
		require.NoError(t, p.Publish("few", sent[:len(sent)-1]...))
		require.NoError(t, p.Publish("with a large one", sent...))
	}
	for topic, want := range map[string][]*message.Message{"one by one": sent, "few": sent[:len(sent)-1], "with a large one": sent} {
		want = append(want[:len(want):len(want)], want...)
		f.requireStored(t, topic, want)
		_, delivered := f.subscribe(consumer, outbox.SubscriberConfig{}, topic)
		requireDelivered(t, delivered, want)
	}
}

// Field case F85. A trigger that sent the content along with its notification
// made every transaction with 8,000 bytes of it fail.
func TestPublishAnySize(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	publisher := f.publisher(outbox.PublisherConfig{})
	topic := strings.Repeat("t", 200)
	var sent []*message.Message
	for _, size := range []int{7_999, 8_000, 1 << 20} {
		tx, err := f.connect(t).Begin(t.Context())
		require.NoError(t, err)
		msg := message.NewMessage(strconv.Itoa(size), make([]byte, size))
		require.NoError(t, publishIn(t.Context(), publisher, tx, topic, msg))
		require.NoError(t, tx.Commit(t.Context()))
		sent = append(sent, msg)
	}
	_, delivered := f.subscribe(consumer, outbox.SubscriberConfig{}, topic)
	requireDelivered(t, delivered, sent)
}

// Field case F86. A UUID is any text, and a column of 36 characters is too short
// for what people put there.
func TestPublishKeepsUUIDs(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	publisher := f.publisher(outbox.PublisherConfig{})
	var sent []*message.Message
	for _, length := range []int{0, 1, 36, 37, 255, 1024} {
		sent = append(sent, message.NewMessage(strings.Repeat("u", length), nil))
	}
	sent = append(sent, message.NewMessage(strings.Repeat("é", 512), nil), message.NewMessage("urn:ex:'\"\\ ü", nil))
	for _, msg := range sent {
		require.NoError(t, publisher.Publish("orders", msg))
	}
	require.NoError(t, publisher.Publish("orders", sent...))
	sent = append(sent, sent...)
	f.requireStored(t, "orders", sent)
	_, delivered := f.subscribe(consumer, outbox.SubscriberConfig{}, "orders")
	requireDelivered(t, delivered, sent)
}

// Field case F78. Names that are put together from topics are cut at 63 bytes,
// and two topics then share a table, a channel or a position.
func TestLongTopicsAndGroupsStayApart(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	requireSeparate(t, f, []string{
		strings.Repeat("x", 199) + "a", strings.Repeat("x", 199) + "b", strings.Repeat("é", 32),
		strings.Repeat("n", 57), strings.Repeat("n", 58), strings.Repeat("n", 63), strings.Repeat("n", 64),
		strings.Repeat("n", 1023), strings.Repeat("n", 1024),
	})
}

// Field case F80. A name in the text of a statement is folded, split at dots, or
// run.
func TestOddTopicsAndGroupsStayApart(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	requireSeparate(t, f, []string{
		`a"b`, `a'b`, `x; DROP TABLE t;--`, "orders.v1", "orders_v1", "A", "a", "ü", "u\u0308", "a b", " a", "a ", " ", "%", "_",
		`\`, `\x00`, "$1", "{}", "NULL", "\n", oddSchema, "outbox.messages", "🙂",
	})
}

// requireSeparate fails unless messages published under each name arrive under
// that name and no other, for topics and for groups, and nothing but rows is
// made for any of them.
func requireSeparate(t *testing.T, f *fixture, names []string) {
	t.Helper()
	publisher := f.publisher(outbox.PublisherConfig{})
	consumer := f.consumer(nil)
	before := catalog(t, f.pool)
	want := map[string][]*message.Message{}
	for round := range 3 {
		for i, name := range names {
			msg := message.NewMessage(strconv.Itoa(i), []byte(name+"/"+strconv.Itoa(round)))
			require.NoError(t, publisher.Publish(name, msg))
			want[name] = append(want[name], msg)
		}
	}
	for i, name := range names {
		f.requireStored(t, name, want[name])
		subscriber, delivered := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: name}, name)
		requireDelivered(t, delivered, want[name])
		require.NoError(t, subscriber.Close())

		// The same group elsewhere, and another group here: neither knows of
		// the other's position.
		other := names[(i+1)%len(names)]
		subscriber, delivered = f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: other}, name)
		requireDelivered(t, delivered, want[name])
		require.NoError(t, subscriber.Close())
	}
	require.Equal(t, before, catalog(t, f.pool))
	require.Equal(t, 2*len(names), f.number("SELECT count(*) FROM outbox.cursors"))
}
