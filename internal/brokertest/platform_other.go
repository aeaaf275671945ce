//go:build !unix

package brokertest

import "os/exec"

// isolate does nothing: without a shell there are no programs to start, and the
// servers must be named by variables.
func isolate(*exec.Cmd) {}
