package main

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMeterTakesTheTimeFromOneMessageToAnother(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		m := newMeter()
		m.row()
		m.time(2, 4)
		go func() {
			for range 3 {
				time.Sleep(time.Second)
				m.row()
			}
		}()
		took, err := m.await(t.Context())
		require.NoError(t, err)
		require.Equal(t, 2*time.Second, took)
		require.Equal(t, int64(4), m.received())
	})
}

func TestMeterGivesUp(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		m := newMeter()
		m.time(1, 3)
		go func() {
			time.Sleep(meterPatience - time.Second)
			m.row()
		}()
		start := time.Now()
		_, err := m.await(t.Context())
		require.ErrorContains(t, err, "1 of 3 messages came")
		require.Equal(t, 2*meterPatience, time.Since(start), "what comes gives it patience")

		m.fail(io.ErrUnexpectedEOF)
		m.fail(io.EOF)
		_, err = m.await(t.Context())
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = m.await(ctx)
		require.ErrorIs(t, err, context.Canceled)
	})
}
