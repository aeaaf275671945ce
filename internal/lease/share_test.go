package lease

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSpread(t *testing.T) {
	t.Parallel()

	for name, c := range map[string]struct {
		shards  int
		members []member
		targets []int
		scarce  bool
	}{
		"alone":                      {8, []member{{holder: "a", weight: 1}}, []int{8}, false},
		"8 among 3":                  {8, []member{{holder: "a", weight: 1}, {holder: "b", weight: 1}, {holder: "c", weight: 1}}, []int{3, 3, 2}, false},
		"who has more keeps it":      {8, []member{{holder: "a", weight: 1, held: 2}, {holder: "b", weight: 1, held: 3}, {holder: "c", weight: 1, held: 3}}, []int{2, 3, 3}, false},
		"a newcomer":                 {8, []member{{holder: "a", weight: 1}, {holder: "b", weight: 1, held: 4}, {holder: "c", weight: 1, held: 4}}, []int{2, 3, 3}, false},
		"one shard stays":            {1, []member{{holder: "a", weight: 1}, {holder: "b", weight: 1, held: 1}}, []int{0, 1}, true},
		"by subscriptions":           {6, []member{{holder: "a", weight: 2}, {holder: "b", weight: 1}}, []int{4, 2}, false},
		"more subscriptions than":    {2, []member{{holder: "a", weight: 9}, {holder: "b", weight: 1, held: 1}}, []int{1, 1}, true},
		"no more than one for each":  {4, []member{{holder: "a", weight: 1, held: 4}, {holder: "b", weight: 2}}, []int{2, 2}, false},
		"nothing is left to be had":  {0, []member{{holder: "a", weight: 1, held: 0}}, []int{0}, true},
		"nobody wants what there is": {3, nil, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			require.Equal(t, c.scarce, spread(c.shards, c.members))
			var targets []int
			for _, m := range c.members {
				targets = append(targets, m.target)
			}
			require.Equal(t, c.targets, targets)
		})
	}
}

// Whatever came before, when each gives back what it should and takes what it
// may, all shards are held in a few rounds, nobody has two more than another, and
// nothing moves any more.
func TestSpreadComesToRest(t *testing.T) {
	t.Parallel()

	for seed := range 300 {
		random := rand.New(rand.NewPCG(uint64(seed), 1))
		n := 1 + random.IntN(20)
		members := make([]member, 1+random.IntN(6))
		free := n
		for i := range members {
			members[i] = member{holder: fmt.Sprint(i), weight: 1, held: random.IntN(free + 1)}
			free -= members[i].held
		}
		moves := 0
		for range 10 {
			moves = 0
			for i := range members { // one after the other, in any order
				m := &members[(i+seed)%len(members)]
				spread(n, members)
				if back := giveBack(members, m.holder, free); back > 0 {
					m.held, free, moves = m.held-back, free+back, moves+back
				} else if take := max(0, min(m.target-m.held, free)); take > 0 {
					m.held, free, moves = m.held+take, free-take, moves+take
				}
			}
		}
		require.Zero(t, moves, "seed %d: %+v", seed, members)
		require.Zero(t, free, "seed %d", seed)
		low, high := n, 0
		for _, m := range members {
			low, high = min(low, m.held), max(high, m.held)
		}
		require.LessOrEqual(t, high-low, 1, "seed %d: %+v", seed, members)
	}
}
