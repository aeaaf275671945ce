package delivery

import (
	"slices"
	"time"

	"github.com/millrace/watermill-outbox/internal/window"
)

// Ordering says which messages wait for which.
type Ordering int

const (
	// Strict lets each message wait for the one before.
	Strict Ordering = iota
	// ByKey lets each wait for the one before that has the same key, and those
	// without a key for none.
	ByKey
	// Unordered lets none wait.
	Unordered
)

// line returns the name of the line that a row stands in, or false if it stands
// in none.
func (o Ordering) line(row *window.Row) (line, bool) {
	switch o {
	case Strict:
		return line{}, true
	case ByKey:
		return line{row.Topic, row.Key}, row.Key != ""
	case Unordered:
	}
	return line{}, false
}

// item is a row on its way.
type item struct {
	row   window.Row
	entry *Entry
	// attempts counts those that failed, in the row's earlier lives too; before
	// of them are in the row itself.
	attempts, before int
	suspect          bool
	size             int
	// failingSince is when it failed first in this lease.
	failingSince time.Time
	// timer ends its pause.
	timer *time.Timer
	// metadata are those of the message that is about to be made of it, and result
	// is what became of the last one.
	metadata map[string]string
	result   outcome
}

// decode makes the metadata of the next message of an item.
func (it *item) decode() (err error) {
	it.metadata, err = it.row.DecodeMetadata()
	return err
}

// queue holds the items that were taken in and are not in flight. Of each line
// only the first may go out; the lines take turns, each with one. Its methods
// are called with the engine's mutex held.
type queue struct {
	ordering Ordering
	ready    fifo
	// lines holds what waits behind the first of each line, which is ready, in
	// flight, or waits for its next try.
	lines map[line]*fifo
}

// line names those who wait for each other.
type line struct{ topic, key string }

func newQueue(ordering Ordering) queue {
	return queue{ordering: ordering, lines: map[line]*fifo{}}
}

// add takes in a new item.
func (q *queue) add(it *item) {
	name, ordered := q.ordering.line(&it.row)
	if !ordered {
		q.ready.push(it)
		return
	}
	if line, ok := q.lines[name]; ok {
		if line == nil {
			line = &fifo{}
			q.lines[name] = line
		}
		line.push(it)
		return
	}
	q.lines[name] = nil
	q.ready.push(it)
}

// again makes an item ready that is the first of its line.
func (q *queue) again(it *item) { q.ready.push(it) }

// follow adds to a batch what may go out behind its only item, until it has so
// many: the next of its line that have no past. That it has failed itself keeps
// them from nothing: it is the one that goes first.
func (q *queue) follow(batch []*item, limit int) []*item {
	name, ordered := q.ordering.line(&batch[0].row)
	if !ordered {
		return batch
	}
	waiting := q.lines[name]
	for waiting != nil && waiting.len() > 0 && len(batch) < limit {
		if next := waiting.peek(); next.suspect || next.attempts > 0 {
			break
		}
		batch = append(batch, waiting.pop())
	}
	return batch
}

// unfollow puts an item back that follow took, in front of its line.
func (q *queue) unfollow(it *item) {
	name, _ := q.ordering.line(&it.row)
	if q.lines[name] == nil {
		q.lines[name] = &fifo{}
	}
	q.lines[name].unpop(it)
}

// gone lets the next of the item's line go.
func (q *queue) gone(it *item) {
	name, ordered := q.ordering.line(&it.row)
	if !ordered {
		return
	}
	if line := q.lines[name]; line != nil && line.len() > 0 {
		q.ready.push(line.pop())
		return
	}
	delete(q.lines, name)
}

// fifo is a queue of items. The zero value is empty.
type fifo struct {
	items []*item
	head  int
}

func (f *fifo) len() int { return len(f.items) - f.head }

func (f *fifo) push(it *item) { f.items = append(f.items, it) }

func (f *fifo) unpop(it *item) {
	if f.head == 0 {
		f.items = slices.Insert(f.items, 0, it)
		return
	}
	f.head--
	f.items[f.head] = it
}

func (f *fifo) peek() *item { return f.items[f.head] }

func (f *fifo) pop() *item {
	it := f.items[f.head]
	f.items[f.head] = nil
	f.head++
	if f.head*2 >= len(f.items) {
		n := copy(f.items, f.items[f.head:])
		clear(f.items[n:])
		f.items, f.head = f.items[:n], 0
	}
	return it
}
