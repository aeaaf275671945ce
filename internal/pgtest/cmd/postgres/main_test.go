package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// service is run without a command, in the background.
type service struct {
	url    string
	stdin  io.Closer
	cancel context.CancelFunc
	ended  chan error
}

func setup(t *testing.T) *service {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	stdinRead, stdin := io.Pipe()
	stdoutRead, stdout := io.Pipe()
	t.Cleanup(func() { _ = stdin.Close() })
	s := &service{stdin: stdin, cancel: cancel, ended: make(chan error, 1)}
	go func() {
		_, err := run(ctx, nil, stdinRead, stdout, io.Discard)
		_ = stdout.CloseWithError(err)
		s.ended <- err
	}()
	line, err := bufio.NewReader(stdoutRead).ReadString('\n')
	require.NoError(t, err)
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "OUTBOX_DATABASE_URL=")
	require.True(t, ok, line)
	s.url = url
	conn, err := pgx.Connect(t.Context(), s.url)
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
	return s
}

func (s *service) requireGone(t *testing.T) {
	t.Helper()
	require.NoError(t, <-s.ended)
	_, err := pgx.Connect(t.Context(), s.url)
	require.Error(t, err)
}

func TestRunsUntilStdinEnds(t *testing.T) {
	t.Parallel()
	s := setup(t)
	require.NoError(t, s.stdin.Close())
	s.requireGone(t)
}

func TestRunsUntilInterrupted(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.cancel()
	s.requireGone(t)
}

func TestRunsCommand(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	args := []string{"-durable", "-set", "work_mem=9MB", "--", "/bin/sh", "-c", `echo "$OUTBOX_DATABASE_URL"; cat; exit 7`}
	code, err := run(t.Context(), args, strings.NewReader("from stdin"), &stdout, &stderr)
	require.NoError(t, err)
	require.Equal(t, 7, code)
	require.Regexp(t, `^postgres://\S+\nfrom stdin$`, stdout.String())
	require.Empty(t, stderr.String())
}

// The command gets to end by itself, and the server outlasts it.
func TestInterruptReachesCommand(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stdoutRead, stdout := io.Pipe()
	defer stdoutRead.Close()
	type result struct {
		code int
		err  error
	}
	ended := make(chan result, 1)
	go func() {
		script := `trap 'echo stopping; exit 5' TERM; echo ready; while :; do sleep 0.05; done`
		code, err := run(ctx, []string{"--", "/bin/sh", "-c", script}, strings.NewReader(""), stdout, io.Discard)
		ended <- result{code, err}
	}()
	lines := bufio.NewScanner(stdoutRead)
	require.True(t, lines.Scan())
	require.Equal(t, "ready", lines.Text())
	cancel()
	require.True(t, lines.Scan())
	require.Equal(t, "stopping", lines.Text())
	select {
	case got := <-ended:
		require.NoError(t, got.err)
		require.Equal(t, 5, got.code)
	case <-time.After(30 * time.Second):
		t.Fatal("still running")
	}
}

func TestFailures(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		args   []string
		code   int
		err    string
		stderr string
	}{
		{"unknown flag", []string{"-x"}, 2, "", "flag provided but not defined"},
		{"setting without a value", []string{"-set", "x"}, 2, "", "name=value"},
		{"help", []string{"-h"}, 0, "", "-durable"},
		{"wrong setting", []string{"-set", "x=1"}, 1, `unrecognized configuration parameter "x"`, ""},
		{"no such command", []string{"--", "/no/such/command"}, 127, "no such file", ""},
		{"killed command", []string{"--", "/bin/sh", "-c", "kill -9 $$"}, 1, "signal: killed", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var stderr bytes.Buffer
			code, err := run(t.Context(), test.args, strings.NewReader(""), io.Discard, &stderr)
			require.Equal(t, test.code, code)
			require.Contains(t, stderr.String(), test.stderr)
			if test.err == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, test.err)
		})
	}
}
