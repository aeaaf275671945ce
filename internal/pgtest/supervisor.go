package pgtest

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

//go:embed supervisor.sh
var supervisorScript string

// closeTimeout bounds the wait for the server's end when it is thrown away. The
// postmaster itself kills backends that ignore it after 5 s.
const closeTimeout = 30 * time.Second

// supervisor is the Go side of supervisor.sh: one cluster's folder, and at most
// one postmaster at a time in it.
//
// run, copy and start must not be called concurrently; close may be called at any
// time, more than once.
type supervisor struct {
	bin    string // folder of the server's programs
	folder string // the cluster's folder; removed when done is closed
	stdin  *os.File

	replies chan string   // answers to the one command under way
	done    chan struct{} // closed when the script has ended

	mu         sync.Mutex
	closed     bool        // stdin is closed
	postmaster *postmaster // the latest one, nil if there was none
	complaints []string    // output that is no report, for errors
}

// postmaster is one run of the server.
type postmaster struct {
	pid  int
	gone chan struct{} // closed when it and all its descendants have ended
	code int           // its exit code as a shell tells it; valid once gone is closed

	mu     sync.Mutex
	reaped bool // the pid may belong to another process
}

// signal sends sig to the postmaster, or returns ErrDown if it has ended.
func (p *postmaster) signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return ErrDown
	}
	if err := killProcess(p.pid, sig); err != nil {
		return fmt.Errorf("pgtest: signal %v to postmaster %d: %w", sig, p.pid, err)
	}
	return nil
}

func (p *postmaster) markReaped() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reaped = true
}

// supervise starts a supervisor that runs the programs in bin, as u unless that
// is nil, and waits until it has made its folder in parent, "" for TMPDIR or /tmp.
func supervise(ctx context.Context, bin, parent string, u *user.User) (*supervisor, error) {
	stdinRead, stdin, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pgtest: pipe to the supervisor: %w", err)
	}
	stdout, stdoutWrite, err := os.Pipe()
	if err != nil {
		_ = stdinRead.Close()
		_ = stdin.Close()
		return nil, fmt.Errorf("pgtest: pipe from the supervisor: %w", err)
	}

	// The command outlives ctx: its end is the end of the pipe to it.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", "-c", supervisorScript, "pgtest-supervisor", bin)
	cmd.Dir = "/"
	cmd.Env = serverEnvironment(os.Environ())
	if parent != "" {
		cmd.Env = append(cmd.Env, "TMPDIR="+parent)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdinRead, stdoutWrite, stdoutWrite
	err = isolate(cmd, u)
	if err == nil {
		err = cmd.Start()
	}
	// As long as we hold the script's ends too, neither pipe ever ends.
	_ = stdinRead.Close()
	_ = stdoutWrite.Close()
	if err != nil {
		_ = stdin.Close()
		_ = stdout.Close()
		return nil, fmt.Errorf("pgtest: start the supervisor: %w", err)
	}

	s := &supervisor{bin: bin, stdin: stdin, replies: make(chan string, 1), done: make(chan struct{})}
	go s.listen(cmd, stdout)

	reply, err := s.reply(ctx, "folder")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pgtest: make a temporary folder for the server (set TMPDIR to one that user %s can enter): %w", describe(u), err), s.close())
	}
	s.folder = reply
	return s, nil
}

func describe(u *user.User) string {
	if u == nil {
		return "running this"
	}
	return u.Username
}

// serverEnvironment returns env without what would lead the server's programs
// to another cluster, user or language.
func serverEnvironment(env []string) []string {
	var kept []string
	for _, entry := range env {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "PG") || strings.HasPrefix(name, "LC_") || name == "LANG" || name == "HOME" {
			continue
		}
		kept = append(kept, entry)
	}
	return append(kept, "LC_ALL=C", "HOME=/nonexistent")
}

// listen owns the reports. It ends when the script has.
func (s *supervisor) listen(cmd *exec.Cmd, stdout io.ReadCloser) {
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		switch word {
		case "folder", "ran", "started":
			if word == "started" {
				pid, _ := strconv.Atoi(rest)
				s.mu.Lock()
				s.postmaster = &postmaster{pid: pid, gone: make(chan struct{})}
				s.mu.Unlock()
			}
			s.replies <- lines.Text()
		case "gone":
			// Until now the postmaster was a zombie at worst, and its pid its own.
			s.running().markReaped()
			// Fails only if the script was told to end, and then it reaps by itself.
			_ = s.send("reap")
		case "exited":
			code, _ := strconv.Atoi(rest)
			s.ended(code)
		default:
			s.mu.Lock()
			s.complaints = append(s.complaints, lines.Text())
			s.mu.Unlock()
		}
	}
	_ = stdout.Close()
	// The script's exit code says nothing that the reports did not.
	_ = cmd.Wait()
	s.ended(-1)
	close(s.done)
}

// ended records the end of the latest postmaster, unless that is known or there
// was none. Only listen calls it.
func (s *supervisor) ended(code int) {
	p := s.running()
	if p == nil {
		return
	}
	p.markReaped()
	p.code = code
	close(p.gone)
}

// send writes a command. It returns ErrStopped after close.
func (s *supervisor) send(command string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrStopped
	}
	if _, err := io.WriteString(s.stdin, command+"\n"); err != nil {
		return fmt.Errorf("pgtest: command to the supervisor: %w", err)
	}
	return nil
}

// reply waits for the report that begins with word and returns its rest.
func (s *supervisor) reply(ctx context.Context, word string) (string, error) {
	select {
	case line := <-s.replies:
		got, rest, _ := strings.Cut(line, " ")
		if got != word {
			return "", fmt.Errorf("pgtest: supervisor said %q instead of %q", line, word)
		}
		return rest, nil
	case <-s.done:
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.closed {
			return "", ErrStopped
		}
		return "", fmt.Errorf("pgtest: the supervisor ended: %s", strings.Join(s.complaints, "; "))
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// run runs one of the server's programs to its end, in the cluster's folder.
// Arguments must not hold blanks. If ctx ends first the supervisor is of no use
// any more: the caller closes it.
func (s *supervisor) run(ctx context.Context, program string, args ...string) error {
	return s.await(ctx, program, strings.Join(append([]string{"run", program}, args...), " "))
}

// copy is run for a copy of the data in another cluster's folder.
func (s *supervisor) copy(ctx context.Context, folder string) error {
	return s.await(ctx, "cp", "copy "+folder)
}

// await sends a command that runs a program, and waits for its end.
func (s *supervisor) await(ctx context.Context, program, command string) error {
	if err := s.send(command); err != nil {
		return err
	}
	code, err := s.reply(ctx, "ran")
	if err != nil {
		return fmt.Errorf("pgtest: %s: %w", program, err)
	}
	if code != "0" {
		return fmt.Errorf("pgtest: %s failed with exit code %s:\n%s", program, code, s.logTail(0))
	}
	return nil
}

// start starts the postmaster. There must be none.
func (s *supervisor) start() (*postmaster, error) {
	if err := s.send("start"); err != nil {
		return nil, err
	}
	// The script answers at once, and an answer that nobody awaits would be
	// taken for the next one's: hence no context.
	if _, err := s.reply(context.Background(), "started"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.postmaster, nil
}

// running returns the running postmaster, or nil.
func (s *supervisor) running() *postmaster {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.postmaster == nil {
		return nil
	}
	select {
	case <-s.postmaster.gone:
		return nil
	default:
		return s.postmaster
	}
}

// stopped reports whether close was called.
func (s *supervisor) stopped() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// close takes the server down at once, removes the folder, and waits for both.
func (s *supervisor) close() error {
	s.mu.Lock()
	var err error
	if !s.closed {
		s.closed = true
		err = s.stdin.Close()
	}
	s.mu.Unlock()
	select {
	case <-s.done:
	case <-time.After(closeTimeout):
		return fmt.Errorf("pgtest: the server in %s has not ended within %v: end it by hand", s.folder, closeTimeout)
	}
	if err != nil {
		return fmt.Errorf("pgtest: close the pipe to the supervisor: %w", err)
	}
	return nil
}

func (s *supervisor) logFile() string { return filepath.Join(s.folder, "log") }

// logSize returns how long the log is now, in bytes.
func (s *supervisor) logSize() int64 {
	info, err := os.Stat(s.logFile())
	if err != nil {
		return 0
	}
	return info.Size()
}

// logTail returns the end of the log, at most 4 KiB, and nothing before offset.
func (s *supervisor) logTail(offset int64) string {
	const most = 4096
	f, err := os.Open(s.logFile())
	if err != nil {
		return "(no log: " + err.Error() + ")"
	}
	defer func() { _ = f.Close() }()
	if size := s.logSize(); size-offset > most {
		offset = size - most
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return "(no log: " + err.Error() + ")"
	}
	text, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return "(no log: " + err.Error() + ")"
	}
	return strings.TrimSpace(string(text))
}
