package live

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
)

func TestAsk(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes)
	r.server.set(func(s *fakeServer) { s.snapshot, s.insert, s.flush = "10:20:12", "1/A0", "1/90" })
	before := time.Now()
	answer, err := r.source.ask(t.Context())
	require.NoError(t, err)
	require.False(t, answer.at.Before(before), "no earlier than the answer")
	answer.at = time.Time{}
	require.Equal(t, sample{
		identity: identity{life: window.Life{Era: 7, Boot: "boot"}, timeline: "00000001", publication: "publication"},
		snapshot: snapshot(t, "10:20:12"), insert: 0x1000000A0, flush: 0x100000090,
	}, answer)

	// Nobody has marked this life yet, and there is no publication.
	r.server.set(func(s *fakeServer) { s.boot, s.publication = nil, nil })
	answer, err = r.source.ask(t.Context())
	require.NoError(t, err)
	require.Equal(t, identity{life: window.Life{Era: 7}, timeline: "00000001"}, answer.identity)
}

func TestAskFails(t *testing.T) {
	t.Parallel()

	for name, change := range map[string]func(s *fakeServer){
		"snapshot": func(s *fakeServer) { s.snapshot = "20:10:" },
		"insert":   func(s *fakeServer) { s.insert = "nowhere" },
		"flush":    func(s *fakeServer) { s.flush = "" },
	} {
		r := newRig(t, testBytes)
		r.server.set(change)
		_, err := r.source.ask(t.Context())
		require.Error(t, err, name)
	}
	r := newRig(t, testBytes)
	broken := errors.New("connection lost")
	r.barrier.before = func(context.Context, string) error { return broken }
	_, err := r.source.ask(t.Context())
	require.ErrorIs(t, err, broken)
}

// A message waits for the barrier, so that does not wait for a server that does
// not answer.
func TestAskIsBounded(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, testBytes)
		r.barrier.before = never
		began := time.Now()
		_, err := r.source.ask(t.Context())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		_, err = r.source.drawXID(t.Context())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 2*r.source.config.Timeout, time.Since(began))
	})
}

func TestIdentityDiffers(t *testing.T) {
	t.Parallel()

	base := identity{life: window.Life{Era: 1, Boot: "a"}, timeline: "00000001", publication: "p"}
	require.NoError(t, base.differs(base))
	for want, changes := range map[error][]func(i *identity){
		errOtherServer: {
			func(i *identity) { i.life.Era = 2 },
			func(i *identity) { i.life.Boot = "b" },
			func(i *identity) { i.life.Boot = "" },
			func(i *identity) { i.timeline = "00000002" },
			func(i *identity) { i.timeline, i.publication = "00000002", "q" },
		},
		errPublicationChanged: {
			func(i *identity) { i.publication = "q" },
			func(i *identity) { i.publication = "" },
		},
	} {
		for _, change := range changes {
			now := base
			change(&now)
			require.ErrorIs(t, base.differs(now), want, "%+v", now)
		}
	}
}
