package replication

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOptions(t *testing.T) {
	t.Parallel()
	filled, err := Options{Publications: []string{"p"}}.withDefaults(time.Minute)
	require.NoError(t, err)
	require.Equal(t, Options{
		Publications: []string{"p"}, ProtoVersion: 1, StatusInterval: DefaultStatusInterval, ReceiveTimeout: DefaultReceiveTimeout,
		CloseTimeout: DefaultCloseTimeout, QueueBytes: DefaultQueueBytes,
	}, filled)

	for _, test := range []struct {
		options Options
		sender  time.Duration
		want    time.Duration
	}{
		{Options{}, 0, 10 * time.Second},
		{Options{}, 2 * time.Second, 500 * time.Millisecond},
		{Options{}, time.Millisecond, MinStatusInterval},
		{Options{ReceiveTimeout: 8 * time.Second}, time.Minute, 2 * time.Second},
		{Options{ReceiveTimeout: -1}, 0, 10 * time.Second},
		{Options{StatusInterval: time.Second}, 2 * time.Second, time.Second},
	} {
		test.options.Publications = []string{"p"}
		filled, err := test.options.withDefaults(test.sender)
		if test.sender == time.Millisecond {
			require.ErrorContains(t, err, "wal_sender_timeout of 1ms")
			continue
		}
		require.NoError(t, err)
		require.Equal(t, test.want, filled.StatusInterval)
	}

	for _, test := range []struct {
		change func(*Options)
		text   string
	}{
		{func(o *Options) { o.Publications = nil }, "Publications is empty"},
		{func(o *Options) { o.Publications = []string{"a", strings.Repeat("x", 64)} }, "invalid name"},
		{func(o *Options) { o.ProtoVersion = 5 }, "ProtoVersion is 5, it must be 1 to 4"},
		{func(o *Options) { o.StatusInterval = time.Microsecond }, "StatusInterval is 1µs, it must be at least 10ms"},
		{func(o *Options) { o.StatusInterval = 31 * time.Second }, "at most half of the server's wal_sender_timeout of 1m0s"},
		{func(o *Options) { o.ReceiveTimeout, o.StatusInterval = time.Second, time.Second }, "at most half of ReceiveTimeout, 1s"},
		{func(o *Options) { o.ReadPause = time.Second }, "ReadPause is 1s, it must be between 0 and 100ms"},
		{func(o *Options) { o.ReadPause = -1 }, "ReadPause"},
		{func(o *Options) { o.CloseTimeout = -1 }, "CloseTimeout"},
		{func(o *Options) { o.QueueBytes = 1 }, "QueueBytes is 1, it must be at least 1024"},
		{func(o *Options) { o.StallTimeout = -1 }, "StallTimeout"},
	} {
		o := Options{Publications: []string{"p"}}
		test.change(&o)
		_, err := o.withDefaults(time.Minute)
		require.ErrorContains(t, err, test.text)
	}
}

func TestPluginArguments(t *testing.T) {
	t.Parallel()
	o := Options{Publications: []string{"plain", `Odd "x", 'y'`}, ProtoVersion: 2}
	require.Equal(t, []string{"proto_version '2'", `publication_names '"plain","Odd ""x"", ''y''"'`}, o.pluginArguments())
}
