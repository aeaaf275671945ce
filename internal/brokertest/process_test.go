package brokertest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// envHelper makes the test binary hold a Process until its standard input ends.
const envHelper = "BROKERTEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(envHelper) != "" {
		if err := hold(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// program leaves its process id, and has a child that keeps running without it.
var program = map[string]string{
	"helper.sh": "echo $$ >helper; exec sleep 600\n",
	"start.sh":  "sleep 1 & echo $$ >pid.new; mv pid.new pid; exec sleep 600\n",
}

// written is ready when the program has started.
func written(p *Process) func(context.Context) error {
	return func(context.Context) error {
		_, err := os.Stat(filepath.Join(p.Folder(), "pid"))
		return err
	}
}

func hold() error {
	p, err := NewProcess(program)
	if err != nil {
		return err
	}
	if err := p.Start(context.Background(), written(p)); err != nil {
		return err
	}
	fmt.Println(p.Folder())
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func pid(t *testing.T, p *Process, name string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(p.Folder(), name))
	require.NoError(t, err)
	id, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	return id
}

func alive(id int) bool { return syscall.Kill(id, 0) == nil }

func TestProcess(t *testing.T) {
	t.Parallel()
	p, err := NewProcess(program)
	require.NoError(t, err)
	require.False(t, p.Running())
	require.ErrorIs(t, p.Kill(), ErrDown)
	require.NoError(t, p.Start(t.Context(), written(p)))
	require.ErrorIs(t, p.Start(t.Context(), written(p)), ErrRunning)
	first, helper := pid(t, p, "pid"), pid(t, p, "helper")
	require.NoError(t, p.Kill())
	require.False(t, alive(first))
	require.True(t, alive(helper), "it runs beside all runs")
	require.ErrorIs(t, p.Kill(), ErrDown)
	require.NoError(t, os.Remove(filepath.Join(p.Folder(), "pid")))
	require.NoError(t, p.Start(t.Context(), written(p)))
	second := pid(t, p, "pid")
	require.NotEqual(t, first, second)
	require.Equal(t, helper, pid(t, p, "helper"))

	require.NoError(t, p.Close())
	require.NoError(t, p.Close(), "twice")
	require.False(t, alive(second))
	require.False(t, alive(helper))
	require.NoDirExists(t, p.Folder())
	require.False(t, p.Running())
	require.ErrorIs(t, p.Start(t.Context(), written(p)), ErrShutDown)
	require.ErrorIs(t, p.Kill(), ErrShutDown)
}

func TestProcessEndsAtOnce(t *testing.T) {
	t.Parallel()
	p, err := NewProcess(map[string]string{"start.sh": "echo no luck; exit 3\n"})
	require.NoError(t, err)
	never := errors.New("never")
	err = p.Start(t.Context(), func(context.Context) error { return never })
	require.ErrorContains(t, err, "brokertest: the broker ended while starting:\nno luck")
	require.NoError(t, p.Close())
}

func TestProcessNotReady(t *testing.T) {
	t.Parallel()
	p, err := NewProcess(program)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	never := errors.New("never")
	err = p.Start(ctx, func(context.Context) error { cancel(); return never })
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, never)
	require.False(t, p.Running(), "nobody would expect it")
	require.NoError(t, p.Close())
}

// The owner is killed: the kernel closes the pipe, and the script cleans up.
func TestProcessOwnerKilled(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	tmp := t.TempDir()
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), envHelper+"=1", "TMPDIR="+tmp)
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	p := &Process{folder: strings.TrimSpace(line)}
	ids := []int{pid(t, p, "pid"), pid(t, p, "helper")}
	for _, id := range ids {
		require.True(t, alive(id))
	}
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Eventually(t, func() bool {
		left, err := os.ReadDir(tmp)
		return err == nil && len(left) == 0 && !alive(ids[0]) && !alive(ids[1])
	}, 30*time.Second, 10*time.Millisecond)
}

func TestBase(t *testing.T) {
	t.Parallel()
	var calls []string
	note := func(what string) func(context.Context) error {
		return func(context.Context) error { calls = append(calls, what); return nil }
	}
	b, err := NewBase(t.Context(), "127.0.0.1:1", Engine{
		Start: note("start"), Kill: note("kill"), Remove: func() error { return note("remove")(t.Context()) },
	})
	require.NoError(t, err)
	require.True(t, b.Owned())
	require.ErrorIs(t, b.StartAgain(t.Context()), ErrRunning)
	require.NoError(t, b.Restart(t.Context()))
	require.NoError(t, b.Kill(t.Context()))
	require.ErrorIs(t, b.Kill(t.Context()), ErrDown)
	require.ErrorIs(t, b.Restart(t.Context()), ErrDown)
	require.NoError(t, b.StartAgain(t.Context()))
	require.NoError(t, b.Shutdown())
	require.NoError(t, b.Shutdown())
	require.ErrorIs(t, b.Kill(t.Context()), ErrShutDown)
	require.Equal(t, []string{"start", "kill", "start", "kill", "start", "remove"}, calls)

	// What fails to start is removed.
	calls = nil
	failure := errors.New("no port")
	_, err = NewBase(t.Context(), "127.0.0.1:1", Engine{
		Start:  func(context.Context) error { return failure },
		Remove: func() error { return note("remove")(t.Context()) },
	})
	require.ErrorIs(t, err, failure)
	require.Equal(t, []string{"remove"}, calls)

	other, err := NewBase(t.Context(), "127.0.0.1:1", Engine{Remove: func() error { return nil }})
	require.NoError(t, err)
	require.False(t, other.Owned())
	require.ErrorIs(t, other.Restart(t.Context()), ErrNotOwned)
	require.NoError(t, other.Shutdown())
}
