package window_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
)

func TestPositionValidate(t *testing.T) {
	t.Parallel()

	p, err := window.ParseSnapshot("10:10:")
	require.NoError(t, err)
	c, err := window.ParseSnapshot("20:20:")
	require.NoError(t, err)
	for name, tc := range map[string]struct {
		pos  window.Position
		says string // "" if it is fine
	}{
		"earliest":               {window.Earliest(1), ""},
		"latest":                 {window.Latest(1, p, 5), ""},
		"in mid-window":          {window.Position{P: p, Floor: 5, Step: window.Main, C: c, Top: 9, At: 7}, ""},
		"at the window's start":  {window.Position{P: p, Floor: 5, Step: window.Main, C: c, Top: 9}, ""},
		"among late rows":        {window.Position{P: p, Floor: 5, Step: window.Late, C: c, Top: 9, At: 3}, ""},
		"unknown step":           {window.Position{P: p, Step: "later"}, "step"},
		"negative":               {window.Position{P: p, Step: window.Idle, Floor: -1}, "negative"},
		"window without step":    {window.Position{P: p, Step: window.Idle, C: c}, "open window"},
		"step without window":    {window.Position{P: p, Step: window.Main}, "open window"},
		"window before position": {window.Position{P: c, Step: window.Main, C: p}, "follow"},
		"late row above floor":   {window.Position{P: p, Floor: 5, Step: window.Late, C: c, At: 6}, "floor"},
		"main row below floor":   {window.Position{P: p, Floor: 5, Step: window.Main, C: c, Top: 9, At: 4}, "outside"},
		"main row above top":     {window.Position{P: p, Floor: 5, Step: window.Main, C: c, Top: 9, At: 10}, "outside"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			err := tc.pos.Validate()
			if tc.says == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tc.says)
			}
		})
	}
}
