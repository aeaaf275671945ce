package lease

import (
	"cmp"
	"slices"
)

// member is a living process that wants shards of a topic.
type member struct {
	holder string
	// weight is its number of subscriptions, held how many shards it has.
	weight, held int
	// target is how many it should have.
	target int
}

// spread decides how many of n shards each member should have: as many for each
// subscription, or one more. Who has one more already keeps it. All processes
// decide alike when they see the same, so the members come sorted by holder.
// It reports whether there are fewer shards than subscriptions: then a member may
// have up to its weight if they are free, so that one which is slow to take its
// own leaves none lying.
func spread(n int, members []member) (scarce bool) {
	slices.SortFunc(members, func(a, b member) int { return cmp.Compare(a.holder, b.holder) })
	slots := 0
	for i := range members {
		members[i].weight = max(1, min(members[i].weight, n))
		slots += members[i].weight
	}
	if slots == 0 {
		return false
	}
	each, rest := n/slots, n%slots
	for i := range members {
		members[i].target = members[i].weight * each
	}
	for _, wants := range []func(m member) bool{
		func(m member) bool { return m.held > m.target },
		func(member) bool { return true },
	} {
		for given := true; given && rest > 0; {
			given = false
			for i := range members {
				m := &members[i]
				if rest > 0 && m.target < m.weight*(each+1) && wants(*m) {
					m.target++
					rest--
					given = true
				}
			}
		}
	}
	return each == 0
}

// giveBack returns how many shards a member gives back, so that others get
// theirs: no more than they lack beyond what is free, or soon will be.
func giveBack(members []member, holder string, free int) int {
	lacking := -free
	for _, m := range members {
		lacking += max(0, m.target-m.held)
	}
	for _, m := range members {
		n := max(0, min(m.held-m.target, lacking))
		if m.holder == holder {
			return n
		}
		lacking -= n
	}
	return 0
}
