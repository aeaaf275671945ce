package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"time"
)

// stopTimeout is how long a replica may take to end when it is asked to.
const stopTimeout = 15 * time.Second

// names are those of the replicas.
var names = []string{"A", "B", "C"}

// processes are the replicas that run. Its methods belong to one goroutine.
type processes struct {
	program, url string
	// failed is told of a replica that ends by itself.
	failed context.CancelCauseFunc

	// started are all there ever were, running those that nobody has ended, by
	// name, and killed the numbers of those that were.
	started []*process
	running map[string]*process
	killed  map[int]bool
}

// process is a replica that runs.
type process struct {
	name    string
	command *exec.Cmd
	// ending says that it was asked to end, or is killed.
	ending atomic.Bool
	// ended is closed when it has, with err.
	ended chan struct{}
	err   error
}

func newProcesses(url string, failed context.CancelCauseFunc) (*processes, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return &processes{program: program, url: url, failed: failed, running: map[string]*process{}, killed: map[int]bool{}}, nil
}

// start starts this program once more, as a replica. The end of the context kills
// it.
func (p *processes) start(ctx context.Context, name string) error {
	one := &process{name: name, ended: make(chan struct{})}
	one.command = exec.CommandContext(ctx, p.program) //nolint:gosec // is this program
	one.command.Env = append(os.Environ(), replicaName+"="+name, replicaDatabase+"="+p.url)
	one.command.Stderr = os.Stderr
	// Nothing is written to it: it ends when this process does, however it ends.
	if _, err := one.command.StdinPipe(); err != nil {
		return err
	}
	if err := one.command.Start(); err != nil {
		return fmt.Errorf("start replica %s: %w", name, err)
	}
	p.started = append(p.started, one)
	p.running[name] = one
	go func() {
		defer close(one.ended)
		one.err = one.command.Wait()
		if !one.ending.Load() {
			p.failed(fmt.Errorf("replica %s has ended by itself: %s", name, one.command.ProcessState))
		}
	}()
	return nil
}

// kill9 ends a replica as a crash would.
func (p *processes) kill9(name string) error {
	one := p.running[name]
	delete(p.running, name)
	p.killed[one.command.Process.Pid] = true
	one.ending.Store(true)
	if err := one.command.Process.Kill(); err != nil {
		return fmt.Errorf("kill replica %s: %w", name, err)
	}
	<-one.ended
	return nil
}

// stop asks a replica to end, as a deployment would; it no longer counts. The
// function it returns waits until it has ended.
func (p *processes) stop(name string) (wait func() error, err error) {
	one := p.running[name]
	delete(p.running, name)
	one.ending.Store(true)
	if err := one.command.Process.Signal(syscall.SIGTERM); err != nil {
		return nil, fmt.Errorf("stop replica %s: %w", name, err)
	}
	return func() error {
		select {
		case <-one.ended:
		case <-time.After(stopTimeout):
			return fmt.Errorf("replica %s did not end within %s", name, stopTimeout)
		}
		if one.err != nil {
			return fmt.Errorf("replica %s: %w", name, one.err)
		}
		return nil
	}, nil
}

// kill ends whatever still runs.
func (p *processes) kill() {
	for _, one := range p.started {
		one.ending.Store(true)
		_ = one.command.Process.Kill() // it may have ended
		<-one.ended
	}
}

// pids are the numbers of the processes that run, by name.
func (p *processes) pids() map[string]int {
	pids := map[string]int{}
	for name, one := range p.running {
		pids[name] = one.command.Process.Pid
	}
	return pids
}
