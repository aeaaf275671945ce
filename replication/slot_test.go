package replication

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckSlotName(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a", "1", "_", "temporary", strings.Repeat("x", 63), "my_slot_2"} {
		require.NoError(t, CheckSlotName(name), name)
	}
	for _, name := range []string{"", "Orders", "orders-1", "ä", strings.Repeat("x", 64), "a b", "a\n", `a"`, "a;"} {
		require.ErrorIs(t, CheckSlotName(name), ErrInvalidName, name)
	}
}

func TestCreateSlotCommand(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		options SlotOptions
		version int
		want    string
		err     string
	}{
		{SlotOptions{}, 14, `CREATE_REPLICATION_SLOT "s" LOGICAL pgoutput NOEXPORT_SNAPSHOT`, ""},
		{SlotOptions{Temporary: true}, 18, `CREATE_REPLICATION_SLOT "s" TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT`, ""},
		{SlotOptions{Failover: true}, 17, `CREATE_REPLICATION_SLOT "s" LOGICAL pgoutput (SNAPSHOT 'nothing', FAILOVER true)`, ""},
		{SlotOptions{Failover: true}, 16, "", "need PostgreSQL 17, the server is 16"},
		{SlotOptions{Failover: true, Temporary: true}, 17, "", "cannot be a failover slot"},
	} {
		got, err := createSlotCommand("s", test.options, test.version)
		if test.err != "" {
			require.ErrorContains(t, err, test.err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, test.want, got)
	}
}
