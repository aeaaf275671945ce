package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// briefly is how long the tests stay in a phase.
const briefly = 300 * time.Millisecond

func TestLive(t *testing.T) {
	t.Parallel()

	// A server of its own: no transaction of another test holds up the stream.
	server := pgtest.Own(t, pgtest.Options{})
	var out strings.Builder
	r, err := run(t.Context(), pgtest.Pool(t, pgtest.DatabaseOn(t, server)), briefly, &out)
	t.Logf("%s%s", &out, r)
	require.NoError(t, err)

	require.True(t, r.ok())
	require.False(t, r.cannotBeLive)
	require.NotEmpty(t, r.wal)
	require.NotEmpty(t, r.table)
	// The source changed when the stream came, went and came back.
	requireInOrder(t, out.String(),
		"Start", "s polling: ", "s live: ", "Live\n", "Cut", "s polling: ", "s live: ", "Live again\n")
	require.Regexp(t, `^published=\d+ delivered=\d+ lost=0 duplicated=0 live=[1-9]\d*% median_wal=\d+\.\dms median_table=\d+\.\dms$`, r.String())
}

func TestServerWithoutLogicalWAL(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{"wal_level": "replica"}})
	var out strings.Builder
	r, err := run(t.Context(), pgtest.Pool(t, pgtest.DatabaseOn(t, server)), briefly, &out)
	t.Logf("%s%s", &out, r)
	require.NoError(t, err)

	require.True(t, r.ok())
	require.True(t, r.cannotBeLive)
	require.Contains(t, out.String(), "ALTER SYSTEM SET wal_level = logical")
	require.Regexp(t, `^published=\d+ delivered=\d+ lost=0 duplicated=0 live=0% median_wal=- median_table=\d+\.\dms$`, r.String())
}

// TestResultNotices makes sure that the program would not praise an outbox that
// loses or repeats messages, or that only polls.
func TestResultNotices(t *testing.T) {
	t.Parallel()

	const published = 3
	tests := map[string]struct {
		arrived []int
		source  outbox.Source
		want    string
		ok      bool
	}{
		"nothing wrong":   {[]int{1, 2, 3}, outbox.SourceWAL, "delivered=3 lost=0 duplicated=0 live=100% median_wal=2.0ms median_table=-", true},
		"lost":            {[]int{1, 3}, outbox.SourceWAL, "delivered=2 lost=1 duplicated=0 live=100% median_wal=3.0ms median_table=-", false},
		"nothing arrives": {nil, outbox.SourceWAL, "delivered=0 lost=3 duplicated=0 live=0% median_wal=- median_table=-", false},
		"repeated":        {[]int{1, 2, 2, 3}, outbox.SourceWAL, "delivered=4 lost=0 duplicated=1 live=100% median_wal=2.0ms median_table=-", false},
		"never live":      {[]int{1, 2, 3}, outbox.SourceTable, "delivered=3 lost=0 duplicated=0 live=0% median_wal=- median_table=2.0ms", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			now := time.Now()
			b := newBook()
			for i := range published {
				b.committing(fmt.Sprint(i+1), now)
			}
			for _, i := range test.arrived {
				b.arrived(fmt.Sprint(i), test.source, now.Add(time.Duration(i)*time.Millisecond))
			}
			r := b.result()
			require.Equal(t, "published=3 "+test.want, r.String())
			require.Equal(t, test.ok, r.ok())
			require.Equal(t, r.lost, b.missing())
			r.cannotBeLive = true
			require.Equal(t, test.ok || name == "never live", r.ok(), "a server that cannot is excused")
		})
	}
}

// requireInOrder fails the test unless text has the parts one after another.
func requireInOrder(t *testing.T, text string, parts ...string) {
	t.Helper()
	rest := text
	for _, part := range parts {
		_, after, found := strings.Cut(rest, part)
		require.True(t, found, "no %q in %q of:\n%s", part, rest, text)
		rest = after
	}
}
