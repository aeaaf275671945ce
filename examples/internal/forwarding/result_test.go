package forwarding

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestResultNotices makes sure that the examples would not praise a forwarder that
// loses, repeats, overtakes, or forwards what was rolled back.
func TestResultNotices(t *testing.T) {
	t.Parallel()

	var published []change
	for version := 1; version <= committed/orders; version++ {
		for order := 1; order <= orders; order++ {
			published = append(published, change{ID: fmt.Sprintf("%d-%d", order, version), Order: order, Version: version})
		}
	}
	for name, test := range map[string]struct {
		change       func(received []change) []change
		deduplicates bool
		ok           bool
		text         string
	}{
		"nothing wrong": {
			func(r []change) []change { return r }, true, true,
			"published=540 forwarded=540 lost=0 duplicated=0 out_of_order=0",
		},
		"lost": {
			func(r []change) []change { return r[1:] }, false, false,
			"published=540 forwarded=539 lost=1 duplicated=0 out_of_order=0",
		},
		"repeated": {
			func(r []change) []change { return append(r, r[0]) }, false, true,
			"published=540 forwarded=540 lost=0 duplicated=1 out_of_order=0",
		},
		"repeated, which the broker should notice": {
			func(r []change) []change { return append(r, r[0]) }, true, false,
			"published=540 forwarded=540 lost=0 duplicated=1 out_of_order=0",
		},
		"overtaken": {
			func(r []change) []change { r[0], r[orders] = r[orders], r[0]; return r }, false, false,
			"published=540 forwarded=540 lost=0 duplicated=0 out_of_order=1",
		},
		"rolled back": {
			func(r []change) []change { return append(r, change{ID: "?", Order: 1, Version: 28}) }, false, false,
			"published=540 forwarded=541 lost=0 duplicated=0 out_of_order=0",
		},
		"nothing at all": {
			func([]change) []change { return nil }, false, false,
			"published=540 forwarded=0 lost=540 duplicated=0 out_of_order=0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := compare(published, test.change(slices.Clone(published)))
			r.Deduplicates = test.deduplicates
			require.Equal(t, test.ok, r.OK(), r)
			require.Equal(t, test.text, r.String())
		})
	}
}
