package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A value that cannot work is refused when it is given, before any connection is
// made, by an error that names the field and says what it may be.
func TestConsumerConfigIsChecked(t *testing.T) {
	t.Parallel()

	cases := map[string]struct {
		config outbox.ConsumerConfig
		says   []string
	}{
		"schema too long":           {outbox.ConsumerConfig{Schema: strings.Repeat("s", 64)}, []string{"Schema", "63"}},
		"schema of the system's":    {outbox.ConsumerConfig{Schema: "pg_outbox"}, []string{"Schema", "pg_outbox"}},
		"schema with a NUL":         {outbox.ConsumerConfig{Schema: "a\x00"}, []string{"Schema", "NUL"}},
		"one connection":            {outbox.ConsumerConfig{MaxConns: 1}, []string{"MaxConns", "at least 3", "is 1"}},
		"negative connections":      {outbox.ConsumerConfig{MaxConns: -1}, []string{"MaxConns", "is -1"}},
		"polls too often":           {outbox.ConsumerConfig{PollInterval: time.Microsecond}, []string{"PollInterval", "1ms", "1µs"}},
		"polls too seldom":          {outbox.ConsumerConfig{PollInterval: time.Hour}, []string{"PollInterval", "1m0s", "1h0m0s"}},
		"negative poll":             {outbox.ConsumerConfig{PollInterval: -1}, []string{"PollInterval"}},
		"checkpoints too often":     {outbox.ConsumerConfig{CheckpointInterval: time.Microsecond}, []string{"CheckpointInterval", "1ms"}},
		"negative checkpoint":       {outbox.ConsumerConfig{CheckpointInterval: -1}, []string{"CheckpointInterval"}},
		"checkpoint after lease":    {outbox.ConsumerConfig{CheckpointInterval: time.Minute}, []string{"CheckpointInterval", "1m0s", "Lease", "10s"}},
		"short lease":               {outbox.ConsumerConfig{Lease: 999 * time.Millisecond}, []string{"Lease", "1s", "999ms"}},
		"negative lease":            {outbox.ConsumerConfig{Lease: -1}, []string{"Lease"}},
		"short query timeout":       {outbox.ConsumerConfig{QueryTimeout: time.Millisecond}, []string{"QueryTimeout", "10ms", "1ms"}},
		"negative query timeout":    {outbox.ConsumerConfig{QueryTimeout: -1}, []string{"QueryTimeout"}},
		"connections and much else": {outbox.ConsumerConfig{MaxConns: 1, Lease: -1}, []string{"MaxConns"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			consumer, err := outbox.NewConsumer(nil, c.config, nil)
			require.Nil(t, consumer)
			require.ErrorContains(t, err, "outbox: ConsumerConfig.")
			for _, text := range c.says {
				require.ErrorContains(t, err, text)
			}
		})
	}
}

// The bounds themselves are allowed.
func TestConsumerConfigAtItsBounds(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for _, config := range []outbox.ConsumerConfig{
		{MaxConns: outbox.MinMaxConns, PollInterval: outbox.MinPollInterval, CheckpointInterval: time.Millisecond, Lease: outbox.MinLease, QueryTimeout: time.Second},
		{MaxConns: 1000, PollInterval: outbox.MaxPollInterval, CheckpointInterval: time.Hour, Lease: time.Hour, QueryTimeout: time.Hour},
	} {
		config.Schema = oddSchema
		consumer, err := outbox.NewConsumer(f.pool.Config(), config, nil)
		require.NoError(t, err)
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: config.Lease.String()}, "topic")
		require.NotNil(t, messages)
		require.NoError(t, consumer.Close())
	}
}
