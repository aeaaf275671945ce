package pgtest

import (
	"bufio"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The promise of the package: whatever a server is doing when the process that
// started it is killed, no process and no folder stays.
func TestOwnerKilled(t *testing.T) {
	t.Parallel()
	tests := []struct {
		when   string
		helper string
		file   string // kill as soon as this one is there; "" waits for the helper's word
	}{
		{"folder made", "running", "pgtest.*"},
		{"initdb at work", "running", "pgtest.*/data/PG_VERSION"},
		{"postmaster starting", "running", "pgtest.*/data/postmaster.pid"},
		{"running", "running", ""},
		{"down", "down", ""},
		{"postmaster killed", "killed", ""},
	}
	for _, test := range tests {
		t.Run(test.when, func(t *testing.T) {
			t.Parallel()
			tmp := openFolder(t)
			cmd, stderr := helperCommand(t, test.helper, tmp)
			stdin, err := cmd.StdinPipe()
			require.NoError(t, err)
			defer stdin.Close()
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())

			var url string
			if test.file == "" {
				line, err := bufio.NewReader(stdout).ReadString('\n')
				require.NoError(t, err, stderr)
				var dir string
				url, dir, _ = strings.Cut(strings.TrimSpace(line), " ")
				require.DirExists(t, dir)
			} else {
				eventually(t, func() bool {
					found, err := filepath.Glob(filepath.Join(tmp, test.file))
					return err == nil && len(found) > 0
				}, "no %s", test.file)
			}
			require.NoError(t, cmd.Process.Kill())
			require.Error(t, cmd.Wait())

			requireNothingLeft(t, tmp)
			if url != "" {
				u, err := serverURL(url)
				require.NoError(t, err)
				l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", u.Host)
				require.NoError(t, err, "the port is still in use")
				require.NoError(t, l.Close())
			}
		})
	}
}

// A program that forgets Stop, or calls os.Exit, is no worse than one that is
// killed.
func TestOwnerExitsWithoutStop(t *testing.T) {
	t.Parallel()
	tmp := openFolder(t)
	cmd, stderr := helperCommand(t, "careless", tmp)
	require.NoError(t, cmd.Run(), stderr)
	requireNothingLeft(t, tmp)
}

// Stop does not return before everything is gone.
func TestStopLeavesNothing(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	folder := filepath.Dir(s.DataDir())
	require.DirExists(t, folder)
	require.FileExists(t, s.LogFile())

	require.NoError(t, s.Stop())
	require.NoDirExists(t, folder)
	require.NoError(t, s.Stop(), "twice")
	require.ErrorIs(t, s.StartAgain(t.Context()), ErrStopped)
	require.ErrorIs(t, s.Shutdown(t.Context(), Fast), ErrStopped)
	require.ErrorIs(t, s.Reconfigure(t.Context(), nil), ErrStopped)
}

// The programs must not find another cluster through the environment of a
// developer who works with PostgreSQL.
func TestServerEnvironment(t *testing.T) {
	t.Parallel()
	env := serverEnvironment([]string{"PATH=/bin", "PGDATA=/x", "PGPORT=1", "LANG=de_DE", "LC_ALL=de_DE", "HOME=/root", "PG=1"})
	require.Equal(t, []string{"PATH=/bin", "LC_ALL=C", "HOME=/nonexistent"}, env)
}

func TestTemporaryFolderUnusable(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "none"))
	// Falls back to /tmp rather than failing.
	s, err := Start(t.Context(), Options{})
	require.NoError(t, err)
	Cleanup(t, s)
	require.True(t, strings.HasPrefix(s.DataDir(), "/tmp/"), s.DataDir())
	info, err := os.Stat(filepath.Dir(s.DataDir()))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
}

// A postmaster may end before anybody has looked at it. Its exit code is told
// all the same.
func TestPostmasterEndsAtOnce(t *testing.T) {
	t.Parallel()
	bin := openFolder(t)
	for name, script := range map[string]string{
		"initdb":   "mkdir data && : >data/postgresql.conf",
		"postgres": "echo no luck; exit 3",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	for range 20 {
		_, err := create(t.Context(), bin, nil, initialise, freePort)
		require.ErrorContains(t, err, "the server ended with exit code 3 while starting:\nno luck")
	}
}

// A shell starts its background jobs with SIGQUIT ignored. A postmaster that
// was told to quit before it had set up its signals went on for ever, and Stop
// and the folder with it.
func TestStopBeforePostmasterHears(t *testing.T) {
	t.Parallel()
	bin := openFolder(t)
	require.NoError(t, os.WriteFile(filepath.Join(bin, "postgres"), []byte("#!/bin/sh\nexec sleep 60\n"), 0o755))
	u, err := unprivileged()
	require.NoError(t, err)
	for range 10 {
		sup, err := supervise(t.Context(), bin, "", u)
		require.NoError(t, err)
		p, err := sup.start()
		require.NoError(t, err)
		require.NoError(t, sup.close())
		require.NoDirExists(t, sup.folder)
		<-p.gone
		require.ErrorIs(t, p.signal(Fast.signal()), ErrDown)
	}
}
