package outbox

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
)

// It is found in the context of a message, and in what middlewares make of that.
func TestDeliveryFromCtx(t *testing.T) {
	t.Parallel()

	at := time.Now()
	ctx := &deliveryContext{
		Context: t.Context(), attempt: 3, group: "g",
		row: &window.Row{ID: 1, Era: 2, Topic: "t", Key: "k", CreatedAt: at},
	}
	want := Delivery{ID: 1, Era: 2, OrderingKey: "k", PublishedAt: at, Attempt: 3, Topic: "t", ConsumerGroup: "g"}
	derived, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, ctx := range []context.Context{ctx, derived} {
		got, ok := DeliveryFromCtx(ctx)
		require.True(t, ok)
		require.Equal(t, want, got)
	}
	_, ok := DeliveryFromCtx(t.Context())
	require.False(t, ok)
}
