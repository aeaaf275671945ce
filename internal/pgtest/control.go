package pgtest

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Mode says how a server is shut down, as in pg_ctl.
type Mode int

const (
	// Fast disconnects the clients, rolls their transactions back, and
	// checkpoints. The zero value.
	Fast Mode = iota
	// Smart lets no new clients in, waits for the present ones to leave, and
	// checkpoints.
	Smart
	// Immediate is a crash: no checkpoint, clients are cut off, and the next
	// start recovers from the write-ahead log.
	Immediate
)

// Shutdown stops the server and keeps its port and data folder for StartAgain.
// It returns when all its processes have ended, or with ctx's error when ctx
// ends before; the server then still is on its way down. It returns ErrDown if
// the server is not running.
func (s *Server) Shutdown(ctx context.Context, mode Mode) error {
	return s.exclusively(func() error { return s.end(ctx, mode.signal()) })
}

// Kill kills the postmaster with SIGKILL, as the kernel does when it runs out
// of memory, and returns when the server's other processes have ended, too. It
// returns ErrDown if the server is not running.
func (s *Server) Kill(ctx context.Context) error {
	return s.exclusively(func() error { return s.end(ctx, syscall.SIGKILL) })
}

// StartAgain starts the server after Shutdown, Kill or an end of its own, on
// the same port and data, and returns when it is ready for connections. A
// context without a deadline gets one of 2 minutes. It returns ErrRunning if
// the server is running, and an error with the end of the log if it does not
// come up; it may be called again then.
func (s *Server) StartAgain(ctx context.Context) error {
	return s.exclusively(func() error { return s.startAgain(ctx) })
}

// Restart is Shutdown followed by StartAgain.
func (s *Server) Restart(ctx context.Context, mode Mode) error {
	return s.exclusively(func() error {
		if err := s.end(ctx, mode.signal()); err != nil {
			return err
		}
		return s.startAgain(ctx)
	})
}

// Reconfigure adds settings to the server's configuration, and restarts it if
// it is running. If it does not come up the settings are taken back, and the
// server is left down.
func (s *Server) Reconfigure(ctx context.Context, settings map[string]string) error {
	return s.exclusively(func() error {
		merged, err := mergeSettings(s.settings, settings)
		if err != nil {
			return err
		}
		running := s.sup.running() != nil
		if running {
			if err := s.end(ctx, Fast.signal()); err != nil {
				return err
			}
		}
		if err := s.configure(merged); err != nil {
			return err
		}
		if running {
			if err := s.startAgain(ctx); err != nil {
				return errors.Join(err, s.configure(s.settings))
			}
		}
		s.settings = merged
		return nil
	})
}

// exclusively runs one change of the server's state.
func (s *Server) exclusively(change func() error) error {
	if !s.Owned() {
		return ErrNotOwned
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sup.stopped() {
		return ErrStopped
	}
	return change()
}

// end signals the postmaster and waits for the end of all its processes.
func (s *Server) end(ctx context.Context, sig syscall.Signal) error {
	p := s.sup.running()
	if p == nil {
		return ErrDown
	}
	if err := p.signal(sig); err != nil {
		return err
	}
	select {
	case <-p.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pgtest: the server still runs after signal %v: %w", sig, context.Cause(ctx))
	}
}

// startAgain starts the server on its port. Should another process have taken
// it meanwhile, it waits for the port: the clients know no other.
func (s *Server) startAgain(ctx context.Context) error {
	if s.sup.running() != nil {
		return ErrRunning
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		err := s.start(ctx)
		if !errors.Is(err, errPortTaken) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}
