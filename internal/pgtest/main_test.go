package pgtest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// envHelper makes the test binary run a helper instead of its tests: a process
// that a test may kill, or that runs as another user.
const envHelper = "PGTEST_HELPER"

// envLeak makes the test binary leave a goroutine behind.
const envLeak = "PGTEST_LEAK"

func TestMain(m *testing.M) {
	if name := os.Getenv(envHelper); name != "" {
		helper, ok := helpers[name]
		if !ok {
			fmt.Fprintln(os.Stderr, "no helper", name)
			os.Exit(2)
		}
		if err := helper(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(envLeak) != "" {
		go func() { select {} }()
	}
	Main(m)
}

// helpers print what they have to say on standard output, and stay until their
// standard input ends.
var helpers = map[string]func() error{
	// A running server.
	"running": func() error { return helperServer(nil) },
	// A server that is down for now.
	"down": func() error {
		return helperServer(func(s *Server) error { return s.Shutdown(context.Background(), Fast) })
	},
	// A server whose postmaster was killed.
	"killed": func() error {
		return helperServer(func(s *Server) error { return s.Kill(context.Background()) })
	},
	// Like running, but the process ends without Stop.
	"careless": func() error {
		_, err := Start(context.Background(), Options{})
		return err
	},
}

func helperServer(then func(*Server) error) error {
	s, err := Start(context.Background(), Options{})
	if err != nil {
		return err
	}
	if then != nil {
		if err := then(s); err != nil {
			return err
		}
	}
	fmt.Println(s.URL(), s.DataDir())
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return s.Stop()
}

// helperCommand returns a command for a helper which makes its folders in tmp,
// and what it writes to standard error.
func helperCommand(t *testing.T, name, tmp string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	stderr := new(bytes.Buffer)
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), envHelper+"="+name, "TMPDIR="+tmp)
	cmd.Stderr = stderr
	return cmd, stderr
}

// openFolder makes a folder that every user can enter and write to, unlike
// t.TempDir, whose parent belongs to the test's user alone.
func openFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "pgtest-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o777))
	return dir
}

// eventually polls, for events in other processes that send no notice.
func eventually(t *testing.T, condition func() bool, what string, args ...any) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf(what, args...)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// requireNothingLeft waits until no process remains that was started with tmp
// as its TMPDIR, and requires that none has left a file there.
func requireNothingLeft(t *testing.T, tmp string) {
	t.Helper()
	if runtime.GOOS == "linux" {
		eventually(t, func() bool { return len(processesIn(t, tmp)) == 0 }, "processes left with TMPDIR=%s", tmp)
		require.Empty(t, entries(t, tmp))
		return
	}
	eventually(t, func() bool { return len(entries(t, tmp)) == 0 }, "files left in %s", tmp)
}

// processesIn lists the processes whose TMPDIR is tmp.
func processesIn(t *testing.T, tmp string) []string {
	t.Helper()
	environments, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	var found []string
	for _, path := range environments {
		// Processes come and go meanwhile.
		text, err := os.ReadFile(path)
		if err == nil && strings.Contains("\x00"+string(text), "\x00TMPDIR="+tmp+"\x00") {
			found = append(found, path)
		}
	}
	return found
}

func entries(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, entry := range list {
		names = append(names, entry.Name())
	}
	return names
}

// query returns the one value that sql yields.
func query[T any](t *testing.T, url, sql string, args ...any) T {
	t.Helper()
	var value T
	require.NoError(t, withConn(t.Context(), url, func(conn *pgx.Conn) error {
		return conn.QueryRow(t.Context(), sql, args...).Scan(&value)
	}))
	return value
}

// run executes sql.
func run(t *testing.T, url, sql string, args ...any) {
	t.Helper()
	require.NoError(t, withConn(t.Context(), url, func(conn *pgx.Conn) error {
		_, err := conn.Exec(t.Context(), sql, args...)
		return err
	}))
}
