//go:build !unix

package pgtest

import (
	"context"
	"errors"
	"os/exec"
	"os/user"
	"syscall"
)

var errPlatform = errors.New("pgtest: a throw-away server needs a Unix-like system; name a server in " + EnvDatabaseURL + " instead")

func unprivileged() (*user.User, error) { return nil, errPlatform }

func giveAway(string) error { return errPlatform }

func isolate(*exec.Cmd, *user.User) error { return errPlatform }

func (m Mode) signal() syscall.Signal { return syscall.SIGTERM }

func killProcess(int, syscall.Signal) error { return errPlatform }

func lockFile(context.Context, string) (func(), error) { return nil, errPlatform }
