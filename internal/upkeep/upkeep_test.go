package upkeep

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

func TestHold(t *testing.T) {
	t.Parallel()

	for text, want := range map[string]string{
		`{"reason": "nobody"}`: "nobody",
		`{"group": null, "topic": "t", "shard": null, "reason": "unread"}`: `topic "t": unread`,
		`{"group": "g", "topic": "t", "shard": 3, "reason": "behind"}`:     `group "g", topic "t", shard 3: behind`,
	} {
		h, err := parseHold(&text)
		require.NoError(t, err)
		require.Equal(t, want, h.String())
	}
	h, err := parseHold(nil)
	require.NoError(t, err)
	require.Nil(t, h)
	bad := "{"
	_, err = parseHold(&bad)
	require.Error(t, err)
}

func TestEnds(t *testing.T) {
	t.Parallel()

	for code, want := range map[string]bool{
		"08006": true, "25006": true, "28000": true, "3D000": true, "57P01": true, "": true,
		"57014": false, "55P03": false, "42501": false, "42P07": false, "23514": false, "XX000": false, "53100": false,
	} {
		require.Equal(t, want, ends(fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: code})), code)
	}
	require.True(t, ends(errors.New("connection refused")))
}

// brokenDB fails, and notes when it was asked.
type brokenDB struct{ asked []time.Time }

func (db *brokenDB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	db.asked = append(db.asked, time.Now())
	return nil, errors.New("connection refused")
}

// Field case F70: the first pass comes soon after the start, and a database that is
// away is tried again, by and by.
func TestRunBeginsSoonAndBacksOff(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		db := &brokenDB{}
		failed := 0
		u := New(db, Config{
			Schema: "outbox", Interval: time.Hour, Timeout: time.Second, Logger: watermill.NopLogger{},
			Failed: func(error) { failed++ }, Open: func() Session { panic("not without the lease") },
		})
		require.True(t, u.Status().At.IsZero())
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		u.Run(ctx)
		require.LessOrEqual(t, db.asked[0].Sub(began), firstPass)
		require.InDelta(t, 65, len(db.asked), 15, "once in a minute")
		require.GreaterOrEqual(t, failed, len(db.asked)-1)
		require.ErrorContains(t, u.Status().Err, "connection refused")
	})
}
