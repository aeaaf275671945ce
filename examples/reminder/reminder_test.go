package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestReminder(t *testing.T) {
	t.Parallel()

	var out strings.Builder
	r, err := run(t.Context(), pgtest.Pool(t, pgtest.Database(t)), &out)
	t.Logf("%s%s", &out, r)
	require.NoError(t, err)
	require.True(t, r.ok())
	require.Equal(t, "scheduled=3 rolled_back=1 delivered=3 early=0 reminded=2 already_paid=1", r.String())
	require.Contains(t, out.String(), "invoice 3 is due and has been paid")
}

// TestResultNotices makes sure that the program would not praise an outbox that
// delivers too early, twice, or not at all.
func TestResultNotices(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		invoices []string
		after    time.Duration
		ok       bool
	}{
		"nothing wrong": {[]string{"2", "3", "1"}, time.Millisecond, true},
		"on the dot":    {[]string{"2", "3", "1"}, 0, true},
		"early":         {[]string{"2", "3", "1"}, -time.Microsecond, false},
		"lost":          {[]string{"2", "1"}, time.Millisecond, false},
		"repeated":      {[]string{"2", "2", "3", "1", "1"}, time.Millisecond, false},
		"one for other": {[]string{"2", "2", "1"}, time.Millisecond, false},
		"rolled back":   {[]string{"2", "3", "4", "1"}, time.Millisecond, false},
		"none":          {nil, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := newReminders(nil, io.Discard)
			r.scheduled = 3
			for _, invoice := range test.invoices {
				r.note(invoice, invoice == "3", test.after)
			}
			require.Equal(t, test.ok, r.result().ok(), r.result())
		})
	}
}
