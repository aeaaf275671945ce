package main

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestOutboxRouter(t *testing.T) {
	t.Parallel()

	var out strings.Builder
	r, err := run(t.Context(), pgtest.Pool(t, pgtest.Database(t)), &out)
	t.Logf("%s%s", &out, r)
	require.NoError(t, err)
	require.True(t, r.ok())
	require.Equal(t, "published=100 in_stream=99 lost=0 repeated=0 out_of_order=0 outage_errors=9 poisoned=1 poisoned_again=0", r.String())
	require.Contains(t, out.String(), "version 7 of order 3 is in the poison topic: sending message failed: nats: message size exceeds maximum allowed")
}

// TestResultNotices makes sure that the program would not praise a relay that loses,
// repeats or overtakes.
func TestResultNotices(t *testing.T) {
	t.Parallel()

	var published []order
	for version := range versions {
		for id := range orders {
			published = append(published, order{id, version})
		}
	}
	for name, test := range map[string]struct {
		change func(stored []order) []order
		poison []order
		errors int
		ok     bool
	}{
		"nothing wrong":  {nil, []order{oversized}, outageErrors, true},
		"lost":           {func(s []order) []order { return s[1:] }, []order{oversized}, outageErrors, false},
		"repeated":       {func(s []order) []order { return append(s, s[0]) }, []order{oversized}, outageErrors, false},
		"out of order":   {func(s []order) []order { s[0], s[orders] = s[orders], s[0]; return s }, []order{oversized}, outageErrors, false},
		"no outage":      {nil, []order{oversized}, 0, false},
		"not poisoned":   {nil, nil, outageErrors, false},
		"poisoned twice": {nil, []order{oversized, oversized}, outageErrors, false},
		"wrongly so":     {nil, []order{oversized, {1, 1}}, outageErrors, false},
		"nothing at all": {func([]order) []order { return nil }, nil, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			var stored []order
			for _, o := range published {
				if o != oversized {
					stored = append(stored, o)
				}
			}
			if test.change != nil {
				stored = test.change(stored)
			}
			b := newBook(len(published), nil, io.Discard)
			b.errors = test.errors
			for _, o := range test.poison {
				require.NoError(t, b.poison(o.message(t.Context())))
			}
			r := b.compare(published, stored)
			require.Equal(t, test.ok, r.ok(), r)
		})
	}
}
