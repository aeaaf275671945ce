//go:build unix

package brokertest

import (
	"os/exec"
	"syscall"
)

// isolate makes cmd run in a session of its own, out of reach of the terminal's
// signals.
func isolate(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }
