package main

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPaceNoticesThatItWasNotKept(t *testing.T) {
	t.Parallel()

	p := newPace(100, 1, 101)
	p.began[100].Store(int64(time.Second))
	require.Empty(t, p.problem())
	p.began[100].Store(int64(1200 * time.Millisecond))
	require.Contains(t, p.problem(), "101 messages were published in 1.2s instead of 1s")
}

func TestPaceKnowsItsMessages(t *testing.T) {
	t.Parallel()

	p := newPace(100, 1, 3)
	payload := newPayload(payloadBytes)
	binary.BigEndian.PutUint64(payload, 2)
	i, age, err := p.age(payload)
	require.NoError(t, err)
	require.Equal(t, 2, i)
	require.Positive(t, age)
	binary.BigEndian.PutUint64(payload, 3)
	_, _, err = p.age(payload)
	require.Error(t, err)
	_, _, err = p.age(payload[:7])
	require.Error(t, err)
}
