package tests

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A page comes in binary or as text, depending on how the connection runs its
// statements (poolers need some of the modes): what is delivered is the same.
func TestSubscribeInEachQueryMode(t *testing.T) {
	t.Parallel()

	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			db := f.pool.Config()
			db.ConnConfig.DefaultQueryExecMode = mode
			consumer := f.consumerOn(db, nil)
			all := make([]byte, 256)
			for i := range all {
				all[i] = byte(i)
			}
			var sent []*message.Message
			for i := range 25 {
				msg := message.NewMessage(watermill.NewUUID(), all[i:])
				msg.Metadata.Set("odd", "\"quoted\" \\ \t ü 🙂")
				if i%2 == 0 {
					msg.Metadata.Set(outbox.DefaultKeyMetadata, "key")
				}
				sent = append(sent, msg)
			}
			sent[3].Payload, sent[4].Payload = nil, []byte{}
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))

			subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 4}, "topic")
			received := receiveWith(t, messages, len(sent), func(i int, msg *message.Message) {
				d, ok := outbox.DeliveryFromCtx(msg.Context())
				require.True(t, ok)
				require.Positive(t, d.ID)
				require.NotZero(t, d.Era)
				require.False(t, d.PublishedAt.IsZero())
				require.Equal(t, sent[i].Metadata.Get(outbox.DefaultKeyMetadata), d.OrderingKey)
				require.Equal(t, 1, d.Attempt)
				require.Equal(t, "topic", d.Topic)
				require.Equal(t, outbox.DefaultConsumerGroup, d.ConsumerGroup)
			})
			for i, msg := range received {
				require.Equal(t, sent[i].UUID, msg.UUID)
				require.Equal(t, sent[i].Payload, msg.Payload, "message %d", i)
				require.Equal(t, sent[i].Metadata, msg.Metadata)
			}

			// Positions are stored and read in this mode, too.
			require.NoError(t, subscriber.Close())
			last := newMessages(1)
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", last...))
			_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			require.Equal(t, uuids(last), uuids(receive(t, messages, 1)))
		})
	}
}
