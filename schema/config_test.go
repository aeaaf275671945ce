package schema

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestConfigDefaults(t *testing.T) {
	t.Parallel()

	config := Config{}.WithDefaults()
	require.Equal(t, Config{Name: DefaultName, PartitionInterval: DefaultPartitionInterval, LookAhead: DefaultLookAhead}, config)
	require.NoError(t, config.Validate())
	config = Config{Name: "x", PartitionInterval: time.Minute, LookAhead: time.Second}
	require.Equal(t, config, config.WithDefaults())
}

func TestConfigValidate(t *testing.T) {
	t.Parallel()

	for _, config := range []Config{
		{PartitionInterval: MinPartitionInterval, LookAhead: 1000 * time.Second},
		{PartitionInterval: MaxPartitionInterval},
		{PartitionInterval: 61 * time.Second},
		{LookAhead: time.Second},
		{LookAhead: 1000 * time.Hour},
		{Name: strings.Repeat("n", 63)},
		{Name: "PG_outbox"},
		{Name: `; DROP SCHEMA "public"; --`},
	} {
		require.NoError(t, config.WithDefaults().Validate(), "%+v", config)
	}
	for problem, config := range map[string]Config{
		"PartitionInterval must be between 1s and 744h0m0s, is 59ms":                  {PartitionInterval: 59 * time.Millisecond},
		"PartitionInterval must be between 1s and 744h0m0s, is 745h0m0s":              {PartitionInterval: 745 * time.Hour},
		"PartitionInterval must be between 1s and 744h0m0s, is -1h0m0s":               {PartitionInterval: -time.Hour},
		"PartitionInterval must be whole seconds, is 1m0.5s":                          {PartitionInterval: 60_500 * time.Millisecond},
		"LookAhead must be whole seconds and not negative, is -1s":                    {LookAhead: -time.Second},
		"LookAhead must be whole seconds and not negative, is 1.5s":                   {LookAhead: 1500 * time.Millisecond},
		"LookAhead (1001h0m0s) must be at most 1000 times PartitionInterval (1h0m0s)": {LookAhead: 1001 * time.Hour},
		"has 64 bytes": {Name: strings.Repeat("n", 64)},
		"reserved":     {Name: "pg_toast"},
	} {
		require.ErrorContains(t, config.WithDefaults().Validate(), problem)
	}
	require.ErrorContains(t, ValidateName(""), "is empty")
}
