package pgtest

import "os"

// memoryRoom is what must be free, in bytes, for servers to be kept in memory:
// several times what a run of all tests was seen to need at once, 0.7 GB.
const memoryRoom = 3 << 30

// parentFolder returns where the folder of a server is made: in memory, if there
// is room, since a run of the tests makes and removes some 200,000 files. On ext4,
// which looks for an inode that was not freed in the last seconds, that took a
// quarter of the processor time. What is durable is on a disc. "" leaves the place
// to TMPDIR, which wins over this.
func parentFolder(durable bool) string {
	if durable || os.Getenv("TMPDIR") != "" {
		return ""
	}
	folder, free := memoryFolder()
	if free < memoryRoom {
		return ""
	}
	return folder
}
