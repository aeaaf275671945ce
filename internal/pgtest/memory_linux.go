package pgtest

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"syscall"
)

// sharedMemory is where Linux has a file system in memory. In a container it
// often is of 64 MB.
const sharedMemory = "/dev/shm"

// tmpfsMagic is the type of a file system in memory, see statfs(2).
const tmpfsMagic = 0x01021994

var memAvailable = regexp.MustCompile(`(?m)^MemAvailable: +(\d+) kB$`)

// memoryFolder returns a folder in memory, and how many bytes may be put there:
// what the file system allows, and half of what the machine can spare.
func memoryFolder() (folder string, free int64) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(sharedMemory, &fs); err != nil || fs.Type != tmpfsMagic {
		return "", 0
	}
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return "", 0
	}
	available, err := parseMemAvailable(string(info))
	if err != nil {
		return "", 0
	}
	// Its blocks are pages.
	return sharedMemory, min(int64(fs.Bavail)*int64(os.Getpagesize()), available/2)
}

// parseMemAvailable returns the bytes that /proc/meminfo calls available.
func parseMemAvailable(info string) (int64, error) {
	match := memAvailable.FindStringSubmatch(info)
	if match == nil {
		return 0, fmt.Errorf("pgtest: no MemAvailable in /proc/meminfo")
	}
	kB, err := strconv.ParseInt(match[1], 10, 64)
	return kB << 10, err
}
