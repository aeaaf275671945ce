//go:build unix

package pgtest

import (
	"bufio"
	"io"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Run by root the server runs as another user; run by a normal user, as that.
func TestServerIsNotRoots(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	if os.Geteuid() == 0 {
		require.NotZero(t, owner(t, s.DataDir()))
		return
	}
	require.Equal(t, os.Geteuid(), owner(t, s.DataDir()))
}

// The package works for a user without any rights. Root becomes one for this.
func TestNormalUser(t *testing.T) {
	t.Parallel()
	tmp := openFolder(t)
	cmd, stderr := helperCommand(t, "running", tmp)
	cmd.Env = append(cmd.Env, EnvPostgresBin+"="+programs(t)) // another user has another cache
	uid := os.Geteuid()
	if uid == 0 {
		nobody, err := user.Lookup("nobody")
		require.NoError(t, err)
		uid, err = strconv.Atoi(nobody.Uid)
		require.NoError(t, err)
		require.NoError(t, isolate(cmd, nobody))
		// The folder in which "go test" builds is root's alone.
		cmd.Path = filepath.Join(openFolder(t), "helper")
		program, err := os.ReadFile(cmd.Args[0])
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(cmd.Path, program, 0o755))
		cmd.Dir = "/"
	}
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err, stderr)
	url, dir, _ := strings.Cut(strings.TrimSpace(line), " ")
	require.Equal(t, uid, owner(t, dir))
	require.Equal(t, dir, query[string](t, url, "SHOW data_directory"))

	require.NoError(t, stdin.Close())
	rest, err := io.ReadAll(stdout)
	require.NoError(t, err)
	require.Empty(t, rest)
	require.NoError(t, cmd.Wait(), stderr)
	requireNothingLeft(t, tmp)
}

// owner returns the id of the user to whom path belongs.
func owner(t *testing.T, path string) int {
	t.Helper()
	info, err := os.Stat(path)
	require.NoError(t, err)
	return int(info.Sys().(*syscall.Stat_t).Uid)
}

// root's downloads must be readable by the user as whom the server runs.
func TestEnterableByAll(t *testing.T) {
	t.Parallel()
	open := openFolder(t)
	require.True(t, enterableByAll(open))
	require.True(t, enterableByAll(filepath.Join(open, "to", "come")))
	shut := filepath.Join(open, "shut")
	require.NoError(t, os.Mkdir(shut, 0o700))
	require.False(t, enterableByAll(filepath.Join(shut, "cache")))
}
