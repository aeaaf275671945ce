//go:build !linux

package pgtest

// memoryFolder returns no folder: elsewhere there is none that everybody has.
func memoryFolder() (folder string, free int64) { return "", 0 }
