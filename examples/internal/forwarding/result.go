package forwarding

import "fmt"

// Result compares what is in the broker with what was committed.
type Result struct {
	// Published counts what was committed, Forwarded what is in the broker, without
	// what is there again.
	Published, Forwarded int
	// Lost is in the database and not in the broker, Duplicated is in the broker more
	// than once, and OutOfOrder behind a later change of the same order.
	Lost, Duplicated, OutOfOrder int
	// Deduplicates says that nothing may be Duplicated.
	Deduplicates bool
}

// compare compares. received is in the order of the broker.
func compare(published, received []change) Result {
	r := Result{Published: len(published)}
	seen := map[change]bool{}
	newest := map[int]int{}
	for _, c := range received {
		if seen[c] {
			r.Duplicated++
			continue
		}
		seen[c] = true
		if c.Version < newest[c.Order] {
			r.OutOfOrder++
		}
		newest[c.Order] = max(newest[c.Order], c.Version)
	}
	r.Forwarded = len(seen)
	for _, c := range published {
		if !seen[c] {
			r.Lost++
		}
	}
	return r
}

// OK reports whether all that was committed is in the broker, nothing else is, and it
// is in order.
func (r Result) OK() bool {
	return r.Published == committed && r.Forwarded == committed && r.Lost == 0 && r.OutOfOrder == 0 &&
		(r.Duplicated == 0 || !r.Deduplicates)
}

// String is the last line that an example prints.
func (r Result) String() string {
	return fmt.Sprintf("published=%d forwarded=%d lost=%d duplicated=%d out_of_order=%d",
		r.Published, r.Forwarded, r.Lost, r.Duplicated, r.OutOfOrder)
}
