package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) {
	replicaMain() // the program starts itself, which here is the test
	pgtest.Main(m)
}

func TestReplicas(t *testing.T) {
	t.Parallel()

	var out strings.Builder
	r, err := run(t.Context(), pgtest.Pool(t, pgtest.Database(t)), 100*time.Millisecond, &out)
	t.Logf("%s%s", &out, r)
	require.NoError(t, err)
	require.True(t, r.ok())
	require.Positive(t, r.published)
	require.Positive(t, r.rolledBack)
	require.Equal(t, r.published+r.repeated, r.handled)
	require.Regexp(t, `^published=\d+ rolled_back=\d+ handled=\d+ lost=0 repeated=\d+ out_of_order=0 \(`, r.String())

	// Who has how many shards after each step, as far as that is certain.
	steps := strings.Split(out.String(), "\n")
	for _, want := range []string{
		`^Start: `, `^  A=[23] B=[23] C=[23] after `, `^Kill B`, `^  A=4 B=- C=4 after `, `^Start B`, `^  A=[23] B=[23] C=[23] after `,
		`^Stop C`, `^  A=4 B=4 C=- after `, `^Start C`, `^  A=[23] B=[23] C=[23] after `,
		`^Rolling restart: A`, `^  A=[23] B=[23] C=[23] after `, `^Rolling restart: B`, `^  A=[23] B=[23] C=[23] after `,
		`^Rolling restart: C`, `^  A=[23] B=[23] C=[23] after `, `^Reshard`, `^  A=[12] B=[12] C=[12] after `, `^End`, `^  handled after `,
	} {
		require.Regexp(t, want, steps[0])
		steps = steps[1:]
	}
}

// TestCompareNotices makes sure that the program would not praise an outbox that
// loses, swaps or makes up events, or repeats those of replicas that lived.
func TestCompareNotices(t *testing.T) {
	t.Parallel()

	const committed, alive, dead = 3, 1, 2 // versions of the only order, and processes
	type by struct{ version, pid int }
	for name, test := range map[string]struct {
		deliveries []by
		want       result
		ok         bool
	}{
		"nothing wrong":         {[]by{{1, alive}, {2, dead}, {3, alive}}, result{}, true},
		"repeated after a kill": {[]by{{1, dead}, {2, dead}, {1, alive}, {2, alive}, {3, alive}}, result{repeated: 2}, true},
		"repeated":              {[]by{{1, alive}, {2, alive}, {2, alive}, {3, alive}}, result{repeated: 1, unexplained: 1}, false},
		"repeated twice":        {[]by{{1, dead}, {1, alive}, {1, alive}, {2, alive}, {3, alive}}, result{repeated: 2, unexplained: 1}, false},
		"lost":                  {[]by{{1, alive}, {3, alive}}, result{lost: 1}, false},
		"lost by a kill":        {[]by{{1, dead}, {3, alive}}, result{lost: 1}, false},
		"nothing comes":         {nil, result{lost: 3}, false},
		"swapped":               {[]by{{2, alive}, {1, alive}, {3, alive}}, result{outOfOrder: 1}, false},
		"swapped by a kill":     {[]by{{1, dead}, {3, alive}, {2, alive}}, result{outOfOrder: 1}, false},
		"rolled back":           {[]by{{1, alive}, {2, alive}, {3, alive}, {4, alive}}, result{unexplained: 1}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			var deliveries []delivery
			for _, d := range test.deliveries {
				deliveries = append(deliveries, delivery{event: OrderChanged{OrderID: 7, Version: d.version}, pid: d.pid})
			}
			got := compare(map[int]int{7: committed}, deliveries, map[int]bool{dead: true})
			test.want.published, test.want.handled = committed, len(deliveries)
			require.Equal(t, test.want, got)
			require.Equal(t, test.ok, got.ok())
		})
	}
}

// TestEvenNotices makes sure that the program waits for what it says it waits
// for.
func TestEvenNotices(t *testing.T) {
	t.Parallel()

	running := map[string]int{"A": 1, "B": 2}
	for name, test := range map[string]struct {
		balance balance
		even    bool
		text    string
	}{
		"even":          {balance{held: map[int]int{1: 2, 2: 2}}, true, "A=2 B=2 C=-"},
		"uneven":        {balance{held: map[int]int{1: 3, 2: 1}}, false, "A=3 B=1 C=-"},
		"one has all":   {balance{held: map[int]int{1: 4}}, false, "A=4 B=0 C=-"},
		"some are free": {balance{held: map[int]int{1: 1, 2: 1}, free: 2}, false, "A=1 B=1 C=- nobody=2"},
		"one is dead":   {balance{held: map[int]int{1: 1, 2: 1, 3: 2}}, false, "A=1 B=1 C=- ended=2"},
		"other number":  {balance{held: map[int]int{1: 4, 2: 4}}, false, "A=4 B=4 C=-"},
		"none":          {balance{}, false, "A=0 B=0 C=-"},
		"old ones left": {balance{held: map[int]int{1: 2, 2: 2}, ending: 1}, false, "A=2 B=2 C=- old=1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			require.Equal(t, test.even, test.balance.even(running, 4))
			require.Equal(t, test.text, test.balance.text(running))
		})
	}
}
