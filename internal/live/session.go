package live

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/shard"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/replication"
)

// Why a session ends, beside the errors of package replication.
var (
	errOtherServer        = fmt.Errorf("the server is another than the stream's: %w", window.ErrOtherLife)
	errPublicationChanged = errors.New("the publication was altered or dropped")
	errPinned             = errors.New("the slot keeps too much WAL")
)

// heldRetry is the pause before a held transaction is looked for again. Others
// that are held for longer do not make it longer.
var heldRetry = backoff.Policy{Min: 200 * time.Microsecond, Max: 50 * time.Millisecond}

const (
	// maxSamples bounds the samples that the stream has not passed.
	maxSamples = 256
	// steady is how long the stream must keep up before readers attach again.
	steady = time.Second
	// idleTicks is how many ticks pass between two samples when nobody is
	// attached.
	idleTicks = 4
	// A look costs the server as much as some transactions, so when one was about
	// paceFrom of them the next begins no sooner than pace after it.
	paceFrom = 12
	pace     = 2 * time.Millisecond
	// pinnedInterval is how often the slot is looked at.
	pinnedInterval = 2 * time.Second
	// walPage divides the size of the log's pages, 8192 unless PostgreSQL was
	// built otherwise.
	walPage = 4096
)

// unknown is the begin of a topic that the stream has only just heard of.
const unknown = ^uint64(0)

// session is one stream, from its slot to its end.
type session struct {
	source *Source
	slot   string
	base   identity
	// begin is the xid from which on every transaction is in the stream.
	begin uint64
	began time.Time
	// news tells the dispatcher that there are rows.
	news chan struct{}

	// Of the dispatcher alone.
	// held is the pause before the next look for held transactions, 0 without any.
	held  time.Duration
	batch int // how many transactions the last look was about

	mu     sync.Mutex
	stream *replication.Stream
	// oldest is the oldest running transaction, and since when it is.
	oldest      uint64
	oldestSince time.Time
	topics      map[string]*topic // by key
	many        []*topic          // those of them that are many topics in one
	log         *table
	// transactions are those received and not handed over, in the order of
	// their commits. The last may still be coming in.
	transactions []*transaction
	current      *transaction
	// received is how far the stream has come: every transaction that ends at
	// or before it is in transactions, or was.
	received replication.LSN
	// bytes counts what is in transactions and in buffers.
	bytes int
	// foreign counts rows that were not written by their own transaction.
	foreign uint64
	samples []sample
	// lagging says that samples are not passed; healthy since when they are.
	lagging bool
	healthy time.Time
	// ended says that no reader may attach any more.
	ended bool
}

// topic is one that readers want, or many that they want together.
type topic struct {
	session *session
	key     string
	topics  window.Topics
	readers int
	// begin is 0 for topics that were wanted when the stream began, unknown at
	// first for those that came later.
	begin uint64
	// asked says that an id is being drawn for begin.
	asked bool
	// ready says that a snapshot was seen which fits Buffer.Follow, and so will
	// all later ones.
	ready   bool
	buffers []*Buffer
	// pending counts the bytes of rows in transactions.
	pending int
}

// from returns the xid from which on every transaction's rows of this topic are
// in the stream.
func (t *topic) from() uint64 { return max(t.begin, t.session.begin) }

// transaction is one that has committed.
type transaction struct {
	xid  uint32
	rows []bufferedRow
	// bytes is the size of rows.
	bytes int
	// visible says that a barrier saw it: its rows pass as they come.
	visible bool
	// complete says that its Commit was received.
	complete bool
	// looks counts the barriers that did not see it.
	looks int
	// refused are the keys of the topics of which a row did not fit.
	refused map[string]struct{}
}

type bufferedRow struct {
	topic *topic
	group string
	row   window.Row
	// hash says which shard the row belongs to, once it was asked for.
	hash   int64
	hashed bool
}

// in reports whether the row belongs to the shard. Called with session.mu held.
func (r *bufferedRow) in(of Shard) bool {
	if of.Shards <= 1 {
		return true
	}
	if !r.hashed {
		r.hash, r.hashed = shard.Hash(r.row.Key, r.row.ID), true
	}
	return int(r.hash%int64(of.Shards)) == of.Shard
}

// empty reports that there is nothing to hand over.
func (t *transaction) empty() bool { return len(t.rows) == 0 && len(t.refused) == 0 }

// receive takes what the stream says. It runs in the stream's goroutine and must
// not wait.
func (s *session) receive(event replication.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return errEnded
	}
	switch e := event.(type) {
	case *replication.Begin:
		s.current = &transaction{xid: e.XID}
		s.transactions = append(s.transactions, s.current)
	case *replication.Insert:
		if s.current == nil {
			return fmt.Errorf("insert at %s outside of a transaction", e.LSN)
		}
		return s.insert(e)
	case *replication.Commit:
		if s.current == nil {
			return fmt.Errorf("commit at %s without a beginning", e.CommitLSN)
		}
		s.current.complete = true
		if s.current.empty() {
			s.transactions = s.transactions[:len(s.transactions)-1]
		}
		s.current = nil
		s.passed(e.EndLSN)
	case *replication.Keepalive:
		s.passed(e.WALEnd)
	}
	return nil // the rest is other tables' and other people's business
}

// passed notes how far the stream has come.
func (s *session) passed(lsn replication.LSN) { s.received = max(s.received, lsn) }

func (s *session) insert(e *replication.Insert) error {
	if s.log == nil || s.log.relation != e.Relation {
		if e.Relation.Name != "messages" || e.Relation.Schema != s.source.config.Schema {
			return nil // somebody has added a table to the publication
		}
		t, err := newTable(e.Relation)
		if err != nil {
			return fmt.Errorf("insert at %s: %w", e.LSN, err)
		}
		s.log = t
	}
	if len(e.New) != len(e.Relation.Columns) {
		return fmt.Errorf("insert at %s: %d values for %d columns", e.LSN, len(e.New), len(e.Relation.Columns))
	}
	name := s.log.value(e.New, columnTopic).Data
	one := s.topics[string(name)]
	if one == nil && len(s.many) == 0 {
		return nil
	}
	row, group, err := s.log.row(e.New)
	switch {
	case err != nil:
		return fmt.Errorf("insert at %s: %w", e.LSN, err)
	case row.Era != s.base.life.Era || uint32(row.XID&0xffffffff) != s.current.xid:
		// Restored or copied in. Windows find such rows by what they say of
		// themselves, or, as with polling, not at all.
		s.foreign++
		return nil
	}
	if one != nil {
		row.Topic, _ = one.topics.Single()
		s.keep(one, group, row)
	}
	for _, t := range s.many {
		if row.Topic == "" {
			row.Topic = string(name)
		}
		if t.topics.Match(row.Topic) {
			s.keep(t, group, row)
		}
	}
	return nil
}

// keep notes a row for the readers of a topic.
func (s *session) keep(wanted *topic, group string, row window.Row) {
	t := s.current
	size := rowSize(&row)
	if !s.fits(size) {
		t.refuse(wanted)
	} else {
		t.rows = append(t.rows, bufferedRow{topic: wanted, group: group, row: row})
		t.bytes += size
		s.bytes += size
		wanted.pending += size
	}
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// fits makes room where most is used: it closes the fullest buffer, or drops the
// rows of the topic that has most in transactions, whose readers will be detached.
func (s *session) fits(size int) bool {
	if size > s.source.config.Bytes {
		return false // whatever is closed
	}
	for s.bytes+size > s.source.config.Bytes {
		var fullest *Buffer
		var largest *topic
		for _, t := range s.topics {
			if t.pending > 0 && (largest == nil || t.pending > largest.pending) {
				largest = t
			}
			for _, b := range t.buffers {
				if b.bytes > 0 && (fullest == nil || b.bytes > fullest.bytes) {
					fullest = b
				}
			}
		}
		switch {
		case fullest == nil && largest == nil:
			return false
		case fullest == nil || largest != nil && largest.pending > fullest.bytes:
			s.refuse(largest)
		default:
			s.detach(fullest, errRefused)
		}
	}
	return true
}

// refuse drops a topic's rows from the transactions.
func (s *session) refuse(topic *topic) {
	for _, t := range s.transactions {
		kept := t.rows[:0]
		for _, row := range t.rows {
			if row.topic != topic {
				kept = append(kept, row)
				continue
			}
			t.refuse(topic)
			size := rowSize(&row.row)
			t.bytes -= size
			s.bytes -= size
			topic.pending -= size
		}
		clear(t.rows[len(kept):])
		t.rows = kept
	}
}

// refuse notes that a row of the topic did not fit.
func (t *transaction) refuse(topic *topic) {
	if t.refused == nil {
		t.refused = map[string]struct{}{}
	}
	t.refused[topic.key] = struct{}{}
}

// detach closes a buffer and drops what is in it: the table has it.
func (s *session) detach(b *Buffer, why error) {
	if b.closed == nil {
		b.closed = why
		close(b.gone)
		for i, other := range b.topic.buffers {
			if other == b {
				b.topic.buffers = append(b.topic.buffers[:i:i], b.topic.buffers[i+1:]...)
				break
			}
		}
	}
	s.bytes -= b.bytes
	b.rows, b.marks, b.bytes = nil, nil, 0
	b.signal()
}

// detachAll closes all buffers.
func (s *session) detachAll(why error) {
	for _, t := range s.topics {
		for len(t.buffers) > 0 {
			s.detach(t.buffers[0], why)
		}
	}
}

// attach registers a buffer for a topic's reader, or returns nil while the
// stream is not there for it.
func (s *session) attach(key, group string, of Shard) *Buffer {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.attachable(key)
	if t == nil {
		return nil
	}
	b := &Buffer{session: s, topic: t, group: group, shard: of, ready: make(chan struct{}, 1), gone: make(chan struct{})}
	t.buffers = append(t.buffers, b)
	return b
}

// attachable returns the topic if its readers may attach. Called with mu held.
func (s *session) attachable(key string) *topic {
	t := s.topics[key]
	if s.ended || s.lagging || t == nil || !t.ready {
		return nil
	}
	return t
}

// want counts a reader of a topic.
func (s *session) want(topics window.Topics, begin uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.topics[topics.Key()]
	if t == nil {
		t = s.add(topics, begin)
	}
	t.readers++
}

// add begins to keep the rows of topics. Called with mu held, or before there is
// a stream.
func (s *session) add(topics window.Topics, begin uint64) *topic {
	t := &topic{session: s, key: topics.Key(), topics: topics, begin: begin}
	s.topics[t.key] = t
	if _, single := topics.Single(); !single {
		s.many = append(s.many, t)
	}
	return t
}

func (s *session) unwant(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.topics[key]
	if t == nil {
		return
	}
	if t.readers--; t.readers == 0 {
		delete(s.topics, key)
		s.many = slices.DeleteFunc(s.many, func(other *topic) bool { return other == t })
	}
}

// run hands over what comes in until the stream or the context ends, and
// returns why.
func (s *session) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	// Looking at the slot must not keep messages waiting.
	var looking sync.WaitGroup
	defer looking.Wait()
	defer cancel()
	pinned := make(chan error, 1)
	looks := make(chan struct{}, 1) // one at a time
	tick := time.NewTicker(s.source.config.Tick)
	defer tick.Stop()
	look := time.NewTicker(pinnedInterval)
	defer look.Stop()
	again := time.NewTimer(time.Hour)
	defer again.Stop()
	ticks := 0
	for {
		due := false
		select {
		case <-s.news:
		case <-again.C:
		case <-tick.C:
			if ticks++; ticks%idleTicks != 0 && s.unattended() {
				continue
			}
			due = true
		case <-look.C:
			if !s.source.isWanted() {
				return errIdle
			}
			select {
			case looks <- struct{}{}:
			default:
				continue // the pool is busy
			}
			looking.Go(func() {
				defer func() { <-looks }()
				if err := s.source.checkPinned(ctx, s); err != nil {
					select {
					case pinned <- err:
					default:
					}
				}
			})
			continue
		case err := <-pinned:
			return err
		case <-s.stream.Done():
			return s.stream.Err()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		began := time.Now()
		if err := s.step(ctx, due); err != nil {
			return err
		}
		if s.batch >= paceFrom {
			backoff.Wait(ctx, pace-time.Since(began))
		}
		if s.held > 0 {
			again.Reset(s.held)
		}
	}
}

// unattended reports whether the session is not new, and no reader is attached:
// the readers poll, and that is load enough.
func (s *session) unattended() bool {
	if time.Since(s.began) < steady {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.topics {
		if len(t.buffers) > 0 {
			return false
		}
	}
	return true
}

// step hands over what is visible. With due, it takes a sample in any case.
func (s *session) step(ctx context.Context, due bool) error {
	s.batch, s.held = 0, 0
	s.mu.Lock()
	received := s.received
	if s.stream != nil {
		// The tables keep what readers have not handled.
		_ = s.stream.Confirm(received) // fails when the stream has ended, which is seen elsewhere
	}
	asks := due
	for _, t := range s.transactions {
		asks = asks || !t.visible && !t.empty()
	}
	if !asks {
		s.handOver()
		s.mu.Unlock()
		return nil
	}
	s.mu.Unlock()

	answer, err := s.source.ask(ctx)
	if err != nil {
		return err
	}
	if err := s.base.differs(answer.identity); err != nil {
		return err
	}
	if due {
		if err := s.settle(ctx, answer); err != nil {
			return err
		}
	}

	s.mu.Lock()
	for _, t := range s.transactions {
		if t.visible {
			continue
		}
		s.batch++
		if t.visible = answer.snapshot.Sees(replication.WidenXID(t.xid, answer.snapshot.Xmax())); t.visible {
			continue
		}
		t.looks++
		if pause := heldRetry.Ceiling(t.looks); !t.empty() && (s.held == 0 || pause < s.held) {
			s.held = pause // the newest is the next to be seen
		}
	}
	s.handOver()
	s.sample(answer, received)
	before := s.lagging
	if due {
		s.watchLag(answer.at)
	}
	after, behind := s.lagging, s.received < answer.insert
	s.mu.Unlock()

	switch {
	case after && !before:
		s.source.set(Lagging, errLagging.Error(), true)
	case before && !after:
		s.source.set(Open, "", true)
	}
	if due && behind {
		s.stream.Ping()
	}
	return nil
}

// handOver puts the rows of visible transactions into the buffers. Called with
// mu held.
func (s *session) handOver() {
	kept := s.transactions[:0]
	for _, t := range s.transactions {
		if t.visible {
			s.handOverOne(t)
		}
		// One that is coming in stays, so that its next rows have a place.
		if !t.visible || !t.complete {
			kept = append(kept, t)
		}
	}
	clear(s.transactions[len(kept):])
	s.transactions = kept
}

func (s *session) handOverOne(t *transaction) {
	for key := range t.refused {
		if topic := s.topics[key]; topic != nil {
			for len(topic.buffers) > 0 {
				s.detach(topic.buffers[0], errRefused)
			}
		}
	}
	// The transaction's own no longer, before fits looks for what to drop.
	rows := t.rows
	s.bytes -= t.bytes
	t.rows, t.bytes, t.refused = nil, 0, nil
	for i := range rows {
		rows[i].topic.pending -= rowSize(&rows[i].row)
	}
	for first := 0; first < len(rows); {
		topic := rows[first].topic
		after := first + 1
		for after < len(rows) && rows[after].topic == topic {
			after++
		}
		for _, b := range topic.buffers {
			b.add(rows[first:after])
			s.fits(0) // they count once for each reader
		}
		first = after
	}
}

// sample notes a new sample, and passes on the last one that holds: received is
// how far the stream had come before the answer was asked for, so everything
// that an earlier sample saw up to there has been handed over.
func (s *session) sample(answer sample, received replication.LSN) {
	passed := 0
	for passed < len(s.samples) && s.samples[passed].insert <= received {
		passed++
	}
	if passed > 0 {
		last := s.samples[passed-1]
		for _, t := range s.topics {
			for _, b := range t.buffers {
				b.mark(last)
			}
		}
		s.samples = append(s.samples[:0], s.samples[passed:]...)
	}
	if n := len(s.samples); n >= maxSamples {
		s.samples[n-1] = answer // the first tells the lag, the last is the newest
		return
	}
	s.samples = append(s.samples, answer)
}

// watchLag sees whether the stream keeps up.
func (s *session) watchLag(now time.Time) {
	behind := false
	for _, sample := range s.samples {
		// The log may be safe up to a page's end in the middle of a record, which
		// the server cannot send before the rest of it is safe too.
		if sample.flush > s.received && sample.flush%walPage != 0 {
			behind = now.Sub(sample.at) > s.source.config.Lag
			break
		}
	}
	switch {
	case behind && !s.lagging:
		s.lagging = true
		s.healthy = time.Time{}
		s.detachAll(errLagging)
	case behind:
		s.healthy = time.Time{}
	case s.lagging && s.healthy.IsZero():
		s.healthy = now
	case s.lagging && now.Sub(s.healthy) >= steady:
		s.lagging = false
	}
}

// settle lets the readers of a topic attach when the snapshot shows that all
// transactions have ended whose rows might not be in the stream, and finds out
// where topics begin that came later.
func (s *session) settle(ctx context.Context, answer sample) error {
	s.mu.Lock()
	later, woken, waits, ready := false, false, false, false
	for _, t := range s.topics {
		switch {
		case t.begin == unknown:
			t.asked, later = true, true
		case t.ready:
			ready = true
		case answer.snapshot.Xmin() >= t.from():
			t.ready, woken = true, true
		default:
			waits = true
		}
	}
	lagging := s.lagging
	s.mu.Unlock()
	switch {
	case lagging:
	case woken:
		s.source.set(Open, "", true)
	case waits && !ready && time.Since(s.began) > steady:
		s.source.set(Waiting, "a transaction that was running when the slot was made has not ended", false)
	}
	if !later {
		return nil
	}
	n, err := s.source.drawXID(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.topics {
		// One that has come since the id was drawn waits for the next.
		if t.begin == unknown && t.asked {
			t.begin = n
		}
	}
	return nil
}

// end closes all buffers, and takes nothing more in.
func (s *session) end(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.detachAll(why)
	s.transactions, s.current, s.samples = nil, nil, nil
}
