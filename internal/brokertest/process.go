package brokertest

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

//go:embed supervisor.sh
var supervisorScript string

const (
	// answerTimeout bounds the wait for the supervisor's answer to a command: for
	// the end of all processes after a kill.
	answerTimeout = 30 * time.Second

	logTailSize = 4096
)

// Process is a broker that is a program, run in a folder of its own by
// supervisor.sh. No goroutine belongs to it: one that the tests of a process share
// need not be closed, it ends with the process.
//
// All methods may be called concurrently; they take turns.
type Process struct {
	folder string

	mu      sync.Mutex
	cmd     *exec.Cmd
	stdin   *os.File
	stdout  *os.File
	answers *bufio.Reader
	closed  bool
}

// NewProcess makes a folder with the given files. One is "start.sh", which execs
// the program, in the folder and in the foreground; "helper.sh" may be another that
// runs beside it from its first start to the end. Nothing is started yet. The
// caller calls Close.
func NewProcess(files map[string]string) (_ *Process, err error) {
	stdinRead, stdin, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("brokertest: pipe to the supervisor: %w", err)
	}
	stdout, stdoutWrite, err := os.Pipe()
	if err != nil {
		_ = stdinRead.Close()
		_ = stdin.Close()
		return nil, fmt.Errorf("brokertest: pipe from the supervisor: %w", err)
	}
	// Its end is the end of the pipe to it, hence no context.
	cmd := exec.CommandContext(context.Background(), "/bin/sh", "-c", supervisorScript, "brokertest-supervisor")
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdinRead, stdoutWrite, stdoutWrite
	isolate(cmd)
	err = cmd.Start()
	// As long as we hold the script's ends too, neither pipe ever ends.
	_ = stdinRead.Close()
	_ = stdoutWrite.Close()
	p := &Process{cmd: cmd, stdin: stdin, stdout: stdout, answers: bufio.NewReader(stdout)}
	if err != nil {
		_ = stdin.Close()
		_ = stdout.Close()
		return nil, fmt.Errorf("brokertest: start the supervisor: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	line, err := p.answer("folder ")
	if err != nil {
		return nil, fmt.Errorf("brokertest: make a temporary folder (set TMPDIR to one that can be written): %w", err)
	}
	p.folder = line
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(p.folder, name), []byte(text), 0o600); err != nil {
			return nil, fmt.Errorf("brokertest: write %s: %w", name, err)
		}
	}
	return p, nil
}

// Folder returns the folder's path. Close removes it.
func (p *Process) Folder() string { return p.folder }

// Running reports whether the program runs. It is false when it has ended by
// itself, too.
func (p *Process) Running() bool {
	_, err := os.Stat(filepath.Join(p.folder, "gone"))
	return errors.Is(err, os.ErrNotExist) && p.open()
}

func (p *Process) open() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.closed
}

// Start starts the program and waits until ready returns nil, or until ctx ends or
// the program does; its error then has the end of the log, and the program is down.
// Each call of ready has some seconds. It returns ErrRunning or ErrShutDown.
func (p *Process) Start(ctx context.Context, ready func(context.Context) error) error {
	if p.Running() {
		return ErrRunning
	}
	if err := p.command("start", "started"); err != nil {
		return err
	}
	for {
		err := attempt(ctx, ready)
		if err == nil && p.Running() {
			return nil
		}
		if !p.Running() {
			return fmt.Errorf("brokertest: the broker ended while starting:\n%s", p.LogTail())
		}
		select {
		case <-ctx.Done():
			tail := p.LogTail()
			// Nobody would expect a broker that comes up later.
			return errors.Join(fmt.Errorf("brokertest: the broker is not ready (%w, last attempt: %w):\n%s", context.Cause(ctx), err, tail), p.Kill())
		case <-time.After(readyInterval):
		}
	}
}

func attempt(ctx context.Context, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return ready(ctx)
}

// Kill ends the program with SIGKILL and waits for the end of all its processes.
// It returns ErrDown or ErrShutDown.
func (p *Process) Kill() error {
	if p.open() && !p.Running() {
		return ErrDown
	}
	return p.command("kill", "killed")
}

// Close ends the program, removes the folder, and waits for both. It may be called
// more than once.
func (p *Process) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	err := p.stdin.Close()
	// The script's last words are of no interest, its end is.
	_ = p.stdout.SetReadDeadline(time.Now().Add(answerTimeout))
	if _, readErr := io.Copy(io.Discard, p.answers); readErr != nil {
		return errors.Join(err, fmt.Errorf("brokertest: the broker in %s has not ended within %v, end it by hand: %w", p.folder, answerTimeout, readErr))
	}
	_ = p.cmd.Wait()
	return errors.Join(err, p.stdout.Close())
}

// LogTail returns the end of the program's output, at most 4 KiB.
func (p *Process) LogTail() string {
	text, err := os.ReadFile(filepath.Join(p.folder, "log"))
	if err != nil {
		return "(no log: " + err.Error() + ")"
	}
	return strings.TrimSpace(string(text[max(0, len(text)-logTailSize):]))
}

// command gives the supervisor a command and waits for its answer.
func (p *Process) command(verb, want string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrShutDown
	}
	if _, err := io.WriteString(p.stdin, verb+"\n"); err != nil {
		return fmt.Errorf("brokertest: command to the supervisor: %w", err)
	}
	_, err := p.answer(want)
	return err
}

// answer reads one line, which must begin with prefix, and returns its rest.
func (p *Process) answer(prefix string) (string, error) {
	if err := p.stdout.SetReadDeadline(time.Now().Add(answerTimeout)); err != nil {
		return "", fmt.Errorf("brokertest: set a deadline for the supervisor: %w", err)
	}
	line, err := p.answers.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("brokertest: answer of the supervisor: %q, %w", line, err)
	}
	rest, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), prefix)
	if !ok {
		return "", fmt.Errorf("brokertest: the supervisor said %q instead of %q", line, prefix)
	}
	return rest, nil
}

// Program returns the path of a program: the first of the patterns of paths that
// matches, or else what PATH has. Its error says which package to install.
func Program(name, debianPackage, orVariable string, patterns ...string) (string, error) {
	for _, pattern := range patterns {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return "", fmt.Errorf("brokertest: pattern %s: %w", pattern, err)
		}
		if len(found) > 0 {
			return found[len(found)-1], nil
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("brokertest: there is no %s: install it (apt-get install %s), or name a server in %s: %w", name, debianPackage, orVariable, err)
	}
	return path, nil
}

// Quote quotes a text for a shell.
func Quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
