package tests

import "runtime/metrics"

// liveHeap returns how many bytes of this process's heap the last collection found
// in use. With what is garbage by now the heap is as large as the collector is
// late, which is up to whatever else the machine does.
func liveHeap() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
