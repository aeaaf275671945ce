package delivery

import (
	"sync"
	"time"
)

// wavesFrom is how many attempts a message must have for suspects to go out
// together. With fewer, the end of a process that had many out would be one too
// many for the message that caused it.
const wavesFrom = 3

// wave adds to a suspect those that go out with it: others that nothing is known
// against but that they may have been in flight when a process ended. Called with
// mu held.
func (r *run) wave(suspects []*item) []*item {
	if suspects[0].entry.Alone || r.MaxAttempts < wavesFrom {
		return suspects
	}
	for r.queue.ready.len() > 0 && len(suspects) < r.MaxInFlight {
		if next := r.queue.ready.peek(); !next.suspect || next.entry.Alone {
			break
		}
		it := r.queue.ready.pop()
		delete(r.retrying, it)
		suspects = append(suspects, it)
	}
	return suspects
}

// try delivers suspects: one, or some together. That they are out is stored first,
// so that this is known to be the second time if the process ends of it. If there
// were several, each goes out by itself then, and that counts.
func (r *run) try(suspects []*item) {
	late, over := false, false // with mu held
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		over = true
		if late {
			r.stuck--
		} else {
			r.suspectsOut = false
		}
	}()
	out := make([]*item, 0, len(suspects))
	for _, it := range suspects {
		if r.decided(it) {
			r.tried(it)
			continue
		}
		it.result = stopped
		out = append(out, it)
	}
	if len(out) == 0 {
		return
	}
	r.tryOut(out, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !over {
			late = true
			r.suspectsOut = false
			r.stuck++
			r.employ()
		}
	})
}

// tryOut sees to suspects that are to go out. It calls letOthers when they have been
// out for long: others may go out beside them.
func (r *run) tryOut(out []*item, letOthers func()) {
	leave, ok := r.alone()
	if ok {
		defer leave()
		for _, it := range out {
			r.accuse(it, len(out) > 1)
		}
		ok = r.insist("Cannot store which messages are tried", out[0], func() error { return r.Store.Save(r.lease) })
	}
	if !ok { // the end has come
		for _, it := range out {
			r.tried(it)
		}
		return
	}
	defer time.AfterFunc(aloneFor, letOthers).Stop()
	var delivering sync.WaitGroup
	for i := range out {
		delivering.Go(func() {
			r.handOut(out[i : i+1])
			r.tried(out[i])
		})
	}
	delivering.Wait()
}

// tried is done for a suspect, which is none any more: whatever it did, the process
// lives.
func (r *run) tried(it *item) {
	if it.result != settled {
		it.entry.Acquit(it.attempts - it.before)
	}
	it.suspect = false
	r.done([]*item{it})
}

// accuse notes what it says about an item if the process ends now. It was handed
// out before, in the process that ended, so that counts then, too; and if that was
// so among others of which one ended the next process, twice.
func (r *run) accuse(it *item, among bool) {
	failed := it.attempts - it.before
	if among {
		it.entry.AccuseAmong(failed)
		return
	}
	before := 1
	if it.entry.Among {
		before = 2
	}
	it.entry.Count(failed, max(failed, before)+1)
}

// aloneFor is how long suspects keep all else waiting at most, and those of other
// engines: what ends its process does so soon, as a rule, and its channel may be one
// that nobody reads, or its handler a slow one, or one that hangs. They stay accused
// while they are out.
const aloneFor = 3 * time.Second

// alone waits until no other engine of the process has suspects out. leave lets
// the next go, when it is stored that these are out no more.
func (r *run) alone() (leave func(), ok bool) {
	if r.Alone == nil {
		return func() {}, true
	}
	select {
	case r.Alone <- struct{}{}:
	case <-r.over:
		return nil, false
	}
	timer := time.AfterFunc(aloneFor, func() { <-r.Alone })
	return func() {
		if !timer.Stop() {
			return
		}
		if r.going() {
			_ = r.Store.Save(r.lease) // once: it must not keep the others waiting
		}
		<-r.Alone
	}, true
}
