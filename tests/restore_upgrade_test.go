//go:build unix

package tests

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// pg_upgrade moves the files into a new cluster: transaction ids go on, and the
// system identifier is the new cluster's. To the outbox that is a move like any
// other.
func TestRestoreByUpgrade(t *testing.T) {
	t.Parallel()

	options := pgtest.Options{Programs: []string{"pg_upgrade"}}
	old, from := newOwnFixture(t, options)
	packed := old.pack()
	bin := filepath.Dir(old.programPath("pg_upgrade"))
	era := old.era(t)
	old.pool.Close()
	to := pgtest.Own(t, options)
	require.NoError(t, from.Shutdown(context.Background(), pgtest.Fast))
	require.NoError(t, to.Shutdown(context.Background(), pgtest.Fast))

	// The server's user is who may do it, in a folder where it may write.
	info, err := os.Stat(from.DataDir())
	require.NoError(t, err)
	owner, ok := info.Sys().(*syscall.Stat_t)
	require.True(t, ok)
	cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "pg_upgrade"), "--old-bindir="+bin, "--new-bindir="+bin,
		"--old-datadir="+from.DataDir(), "--new-datadir="+to.DataDir(), "--username=postgres",
		"--old-port="+strconv.Itoa(from.Port()), "--new-port="+strconv.Itoa(to.Port()), "--socketdir=/tmp")
	cmd.Dir = filepath.Dir(to.DataDir())
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
	}
	output, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", output)
	require.NoError(t, to.StartAgain(context.Background()))

	moved := &fixture{t: t, url: to.URL(), pool: pgtest.Pool(t, to.URL())}
	require.NotEqual(t, era, moved.era(t))
	require.Empty(t, moved.check(moved.pool))
	moved.unpack(packed)
}
