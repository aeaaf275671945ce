package main

import (
	"encoding/json"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

// TestAuditNotices makes sure that the quick start would not praise an outbox
// that loses, repeats, swaps or makes up events.
func TestAuditNotices(t *testing.T) {
	t.Parallel()

	const committed = 3 // versions of the only order
	tests := map[string]struct {
		versions []int
		want     result
	}{
		"nothing wrong":   {[]int{1, 2, 3}, result{published: 3, delivered: 3}},
		"lost":            {[]int{1, 3}, result{published: 3, delivered: 2, lost: 1}},
		"nothing arrives": {nil, result{published: 3, lost: 3}},
		"repeated":        {[]int{1, 2, 2, 3}, result{published: 3, delivered: 4, duplicated: 1}},
		"repeated later":  {[]int{1, 2, 3, 1}, result{published: 3, delivered: 4, duplicated: 1}},
		"swapped":         {[]int{2, 1, 3}, result{published: 3, delivered: 3, outOfOrder: 1}},
		"rolled back":     {[]int{1, 2, 3, 4}, result{published: 3, delivered: 4}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			a := newAudit()
			for _, version := range test.versions {
				payload, err := json.Marshal(ItemAdded{OrderID: 7, Version: version, Items: version})
				require.NoError(t, err)
				require.NoError(t, a.handle(message.NewMessage("uuid", payload)))
			}
			got := a.compare(map[int]int{7: committed})
			require.Equal(t, test.want, got)
			require.Equal(t, name == "nothing wrong", got.ok())
		})
	}
}
