//go:build unix

package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
	"time"
)

// unprivileged returns the user as which server processes have to run, or nil
// if they can run as the current one. PostgreSQL refuses to run as root.
func unprivileged() (*user.User, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			return u, nil
		}
	}
	return nil, errors.New("pgtest: PostgreSQL can't run as root, and there is neither a user postgres nor a user nobody to run it as: create one, or run as another user")
}

// giveAway makes what is at path the property of the user as which server
// processes run.
func giveAway(path string) error {
	u, err := unprivileged()
	if u == nil || err != nil {
		return err
	}
	uid, gid, err := ids(u)
	if err != nil {
		return err
	}
	return os.Lchown(path, int(uid), int(gid))
}

// isolate makes cmd run in a session of its own, out of reach of the terminal's
// signals, and as u unless that is nil.
func isolate(cmd *exec.Cmd, u *user.User) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if u == nil {
		return nil
	}
	uid, gid, err := ids(u)
	if err != nil {
		return err
	}
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: gid}
	return nil
}

// ids returns the numbers of a user and of its group.
func ids(u *user.User) (uid, gid uint32, err error) {
	id, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return 0, 0, fmt.Errorf("pgtest: id of user %s: %w", u.Username, err)
	}
	group, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return 0, 0, fmt.Errorf("pgtest: group of user %s: %w", u.Username, err)
	}
	return uint32(id), uint32(group), nil
}

// signals of the postmaster, see pg_ctl: TERM waits for the clients to leave,
// INT disconnects them, QUIT is a crash.
func (m Mode) signal() syscall.Signal {
	switch m {
	case Smart:
		return syscall.SIGTERM
	case Immediate:
		return syscall.SIGQUIT
	default:
		return syscall.SIGINT
	}
}

func killProcess(pid int, sig syscall.Signal) error { return syscall.Kill(pid, sig) }

// lockFile takes an exclusive lock that ends with the process at the latest,
// and waits for it until ctx ends.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("wait for the lock on %s: %w", path, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}
