package main

import (
	"io"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestRouter(t *testing.T) {
	t.Parallel()

	var out strings.Builder
	r, err := run(t.Context(), pgtest.Pool(t, pgtest.Database(t)), &out)
	t.Logf("%s%s", &out, r)
	require.NoError(t, err)
	require.True(t, r.ok())
	require.Equal(t, `orders=5 paid=4 calls=10 poisoned=1 reason="card expired" calls_of_it=4 redelivered=0`, r.String())
	require.Contains(t, out.String(), "order-4 is in the poison topic, from topic orders and handler payments: card expired")
}

// TestResultNotices makes sure that the program would not praise an outbox that
// loses or repeats messages, or middlewares in the wrong order.
func TestResultNotices(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		calls    []string
		poisoned []string
		ok       bool
	}{
		"nothing wrong":     {[]string{"order-1", "order-4", "order-4", "order-4", "order-4"}, []string{"order-4"}, true},
		"not retried":       {[]string{"order-1", "order-4"}, []string{"order-4"}, false},
		"too often":         {[]string{"order-1", "order-4", "order-4", "order-4", "order-4", "order-4"}, []string{"order-4"}, false},
		"paid twice":        {[]string{"order-1", "order-1", "order-4", "order-4", "order-4", "order-4"}, []string{"order-4"}, false},
		"not paid":          {[]string{"order-4", "order-4", "order-4", "order-4"}, []string{"order-4"}, false},
		"poisoned twice":    {[]string{"order-1", "order-4", "order-4", "order-4", "order-4"}, []string{"order-4", "order-4"}, false},
		"nothing poisoned":  {[]string{"order-1", "order-4", "order-4", "order-4", "order-4"}, nil, false},
		"nothing at all":    {nil, nil, false},
		"poisoned for free": {[]string{"order-1"}, []string{"order-4"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			p := newPayments(2, io.Discard)
			reasons := map[string]string{}
			for _, order := range test.calls {
				if err := p.pay(message.NewMessage("uuid", []byte(order))); err != nil {
					reasons[order] = err.Error()
				}
			}
			for _, order := range test.poisoned {
				msg := message.NewMessage("uuid", []byte(order))
				msg.Metadata.Set(middleware.ReasonForPoisonedKey, reasons[order])
				require.NoError(t, p.poisoned(msg))
			}
			r := p.result()
			require.Equal(t, test.ok, r.ok(), r)
			r.redelivered = 1
			require.False(t, r.ok())
		})
	}
}
