package live

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/replication"
	"github.com/millrace/watermill-outbox/schema"
)

//go:embed queries/*.sql
var queries embed.FS

const (
	// oldTransaction is how old a running transaction may be for a slot to be
	// created, which waits for it.
	oldTransaction = 3 * time.Second
	// lockTimeout ends the creation of a slot on the server, should this process
	// be killed meanwhile.
	lockTimeout = "2s"
	// senderTimeout is how long the server keeps a stream, and its slot, of
	// which it hears nothing.
	senderTimeout = "10s"
	// openTimeout bounds the opening of a stream.
	openTimeout = 20 * time.Second
	// recheckInterval is how often a reason that takes a person is looked at
	// again, holderInterval one that takes the end of a transaction.
	recheckInterval = 10 * time.Second
	holderInterval  = time.Second
	// proven is how long a stream must have lasted for the back-off to begin
	// again.
	proven = 30 * time.Second

	// pinnedFactor is how much more than MaxPinned a slot may keep that no long
	// transaction pins.
	pinnedFactor = 4

	// readBuffer, and a pause before reads when much comes in, let one read take
	// many messages, each of which would wake the reader and slow the sender.
	readBuffer    = 256 << 10
	readPause     = 200 * time.Microsecond
	readPauseRate = 6000
)

// errHolder says that a stream has to wait for a transaction.
var errHolder = errors.New("a transaction has been running for long")

// errImpossible says that a person has to change something.
var errImpossible = errors.New("the WAL cannot be read")

// DB runs one statement at a time.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Config of a Source; all of it is needed.
type Config struct {
	Schema      string
	Publication string
	// Connect opens a replication connection.
	Connect func(ctx context.Context, options replication.ConnectOptions) (*replication.Conn, error)
	// Barrier runs the statements on which delivery waits, DB all others.
	Barrier, DB DB
	// Problems says what a person has to change before the WAL can be read.
	Problems func(ctx context.Context) ([]string, error)
	// Tick is the time between two samples when nothing comes in.
	Tick time.Duration
	// Lag is how long a sample may not be passed.
	Lag time.Duration
	// Bytes bounds what is between the connection and the readers.
	Bytes int
	// MaxPinned is how much WAL the slot may keep.
	MaxPinned int64
	// Timeout bounds the barrier's statement.
	Timeout time.Duration
	// Failed is told of each statement that failed.
	Failed func(err error)
	Logger watermill.LoggerAdapter
}

// State says what the stream does.
type State string

// The states; see the package documentation.
const (
	Idle    State = "idle"
	Opening State = "opening"
	Open    State = "open"
	Lagging State = "lagging"
	Waiting State = "waiting"
)

// Status is how things stand.
type Status struct {
	State State
	// Reason says why it is not open.
	Reason string
	Since  time.Time
	// Slot is the name of the replication slot, if there is a stream.
	Slot string
	// Received is how far the stream has come.
	Received replication.LSN
	// Buffered is how many bytes wait for the dispatcher or for readers.
	Buffered int
	// Attached is how many readers get their rows from the stream.
	Attached int
	// Foreign counts the rows that the stream left out, since they were not
	// written by the transaction that they name.
	Foreign uint64
}

// Source opens the stream when readers want it, and again when it was lost. Run
// does its work; the other methods may be called at any time, concurrently.
type Source struct {
	config  Config
	queries struct{ barrier, oldest, pinned string }

	mu      sync.Mutex
	wanted  map[string]*wish // by the key of what is wanted
	started chan struct{}    // gets something when the first wants
	session *session
	status  Status
	changed chan struct{} // closed and replaced when readers may attach, or not
	holder  holder
}

// New returns a source.
func New(config Config) *Source {
	s := &Source{
		config: config, wanted: map[string]*wish{}, started: make(chan struct{}, 1),
		status: Status{State: Idle, Since: time.Now()}, changed: make(chan struct{}),
	}
	text := func(file string) string {
		content, err := queries.ReadFile("queries/" + file + ".sql")
		if err != nil {
			panic(err) // embedded: cannot be missing
		}
		return schema.Text(config.Schema, string(content))
	}
	s.queries.barrier, s.queries.oldest, s.queries.pinned = text("barrier"), text("oldest"), text("pinned")
	return s
}

// wish is for the rows of topics, of so many readers.
type wish struct {
	topics  window.Topics
	readers int
}

// Interest is a reader's wish for the rows of a topic, or of many.
type Interest struct {
	source *Source
	key    string
}

// Want says that a reader would attach. While nobody does, no stream is open.
func (s *Source) Want(topics window.Topics) *Interest {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := topics.Key()
	if s.wanted[key] == nil {
		s.wanted[key] = &wish{topics: topics}
	}
	s.wanted[key].readers++
	if s.session != nil {
		s.session.want(topics, unknown)
	}
	select {
	case s.started <- struct{}{}:
	default:
	}
	return &Interest{source: s, key: key}
}

// Close ends the interest.
func (i *Interest) Close() {
	s := i.source
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.wanted[i.key]
	if w.readers--; w.readers == 0 {
		delete(s.wanted, i.key)
	}
	if s.session != nil {
		s.session.unwant(i.key)
	}
}

// Attach registers a buffer between two windows, or returns nil while there is
// no stream to attach to. The reader then opens a window, and goes on with the
// buffer if Follow accepts it; otherwise it closes the buffer. The buffer gets
// only the rows of the shard.
func (i *Interest) Attach(group string, of Shard) *Buffer {
	i.source.mu.Lock()
	session := i.source.session
	i.source.mu.Unlock()
	if session == nil {
		return nil
	}
	return session.attach(i.key, group, of)
}

// Ready reports whether Attach would return a buffer now.
func (i *Interest) Ready() bool {
	i.source.mu.Lock()
	session := i.source.session
	i.source.mu.Unlock()
	if session == nil {
		return false
	}
	session.mu.Lock()
	defer session.mu.Unlock()
	return session.attachable(i.key) != nil
}

// Changed returns a channel that is closed when it may be worth trying to attach.
func (s *Source) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Status returns how things stand.
func (s *Source) Status() Status {
	s.mu.Lock()
	status, session := s.status, s.session
	s.mu.Unlock()
	if session != nil {
		session.mu.Lock()
		defer session.mu.Unlock()
		status.Slot, status.Received, status.Buffered, status.Foreign = session.slot, session.received, session.bytes, session.foreign
		for _, t := range session.topics {
			status.Attached += len(t.buffers)
		}
	}
	return status
}

// set changes the state, and says so in the log when it is another. With wake,
// readers look whether they can attach.
func (s *Source) set(state State, reason string, wake bool) {
	s.mu.Lock()
	before := s.status
	if before.State != state || before.Reason != reason {
		s.status = Status{State: state, Reason: reason, Since: time.Now()}
	}
	if wake {
		close(s.changed)
		s.changed = make(chan struct{})
	}
	s.mu.Unlock()
	if before.State == state && before.Reason == reason {
		return
	}
	switch state {
	case Open:
		s.config.Logger.Info("Messages are read from the WAL", nil)
	case Lagging, Waiting:
		s.config.Logger.Info("Messages are polled: "+reason, nil)
	case Idle, Opening:
	}
}

// Run opens the stream while readers want it, until the context ends.
func (s *Source) Run(ctx context.Context) {
	retry := backoff.Policy{Min: 200 * time.Millisecond, Max: 10 * time.Second}
	failures := 0
	for ctx.Err() == nil {
		if !s.isWanted() {
			s.set(Idle, "", false)
			select {
			case <-s.started:
			case <-ctx.Done():
			}
			continue
		}
		began := time.Now()
		err := s.stream(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > proven {
			failures = 0
		}
		var pause time.Duration
		switch {
		case errors.Is(err, errIdle):
			failures = 0
			continue
		case errors.Is(err, errHolder):
			failures, pause = 0, holderInterval
		case errors.Is(err, errImpossible), errors.Is(err, errPinned), replication.IsMisconfigured(err):
			failures, pause = 0, recheckInterval
		case errors.Is(err, errPublicationChanged):
			failures++
			pause = retry.Delay(failures)
		default:
			failures++
			pause = retry.Delay(failures)
			s.config.Failed(err)
		}
		s.set(Waiting, err.Error(), false)
		backoff.Wait(ctx, pause)
	}
}

func (s *Source) isWanted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.wanted) > 0
}

// errIdle ends a session that nobody wants any more.
var errIdle = errors.New("no reader is left")

// stream opens a session and runs it to its end.
func (s *Source) stream(ctx context.Context) error {
	opening, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	session, err := s.open(opening)
	if err != nil {
		return err
	}
	err = session.run(ctx)
	s.mu.Lock()
	s.session = nil
	s.mu.Unlock()
	session.end(err)
	_ = session.stream.Close() // the slot goes with the connection in any case
	return err
}

// open makes a slot and starts its stream.
func (s *Source) open(ctx context.Context) (*session, error) {
	// Before the problems are looked for: as it is found without fault the
	// publication must be from the slot on.
	before, err := s.ask(ctx)
	if err != nil {
		return nil, err
	}
	problems, err := s.config.Problems(ctx)
	if err != nil {
		return nil, err
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("%w: %s", errImpossible, strings.Join(problems, "; "))
	}
	if err := s.checkHolder(ctx, before.life); err != nil {
		return nil, err
	}
	// The reason for waiting stays to be read until the stream is open.
	if s.Status().State == Idle {
		s.set(Opening, "", false)
	}
	conn, err := s.config.Connect(ctx, replication.ConnectOptions{
		ReadBuffer: readBuffer,
		Settings:   map[string]string{"lock_timeout": lockTimeout, "wal_sender_timeout": senderTimeout},
	})
	if err != nil {
		return nil, err
	}
	session, err := s.openOn(ctx, conn, before.identity)
	if err != nil {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing) // the slot goes with it
		return nil, err
	}
	return session, nil
}

func (s *Source) openOn(ctx context.Context, conn *replication.Conn, before identity) (*session, error) {
	system, err := conn.IdentifySystem(ctx)
	if err != nil {
		return nil, err
	}
	slot := slotName()
	created, err := conn.CreateSlot(ctx, slot, replication.SlotOptions{Temporary: true})
	if errors.Is(err, replication.ErrLockTimeout) {
		return nil, s.awaitHolder(ctx, before.life, err)
	}
	if err != nil {
		return nil, err
	}
	// In this order: the slot, then N, then the identity that N belongs to.
	n, err := s.drawXID(ctx)
	if err != nil {
		return nil, err
	}
	first, err := s.ask(ctx)
	if err != nil {
		return nil, err
	}
	switch {
	case first.publication == "":
		return nil, fmt.Errorf("%w: publication %q is missing", errImpossible, s.config.Publication)
	case first.life.Boot == "":
		return nil, errors.New("this life of the server has not been marked yet")
	case fmt.Sprint(first.life.Era) != system.ID || first.timeline != fmt.Sprintf("%08X", system.Timeline):
		return nil, fmt.Errorf("%w: replication and ordinary connections lead to different servers", errOtherServer)
	}
	// A copy of the server says the same of itself, but has not this slot.
	if _, err := s.pinned(ctx, s.config.Barrier, slot); err != nil {
		return nil, err
	}
	if err := before.differs(first.identity); err != nil {
		return nil, err
	}
	session := &session{
		source: s, slot: slot, base: first.identity, begin: n, began: time.Now(),
		news: make(chan struct{}, 1), topics: map[string]*topic{}, received: created.ConsistentPoint,
	}
	s.mu.Lock()
	for _, w := range s.wanted {
		session.add(w.topics, 0).readers = w.readers
	}
	s.session = session
	s.mu.Unlock()
	stream, err := replication.Start(ctx, conn, slot, created.ConsistentPoint, replication.Options{
		Publications: []string{s.config.Publication}, Binary: true,
		StatusInterval: time.Second, ReceiveTimeout: 10 * time.Second,
		ReadPause: readPause, ReadPauseRate: readPauseRate,
	}, session.receive)
	if err != nil {
		s.mu.Lock()
		s.session = nil
		s.mu.Unlock()
		session.end(err)
		return nil, err
	}
	session.mu.Lock()
	session.stream = stream
	session.mu.Unlock()
	return session, nil
}

// slotName returns a name that no other slot has.
func slotName() string {
	return "watermill_outbox_" + strings.ReplaceAll(uuid.NewString(), "-", "")
}

// drawXID draws a transaction id, in a transaction of its own: whatever was
// running has a lower one, unless it has none yet.
func (s *Source) drawXID(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeout)
	defer cancel()
	rows, err := s.config.Barrier.Query(ctx, "SELECT pg_current_xact_id()::text::bigint")
	if err != nil {
		return 0, fmt.Errorf("draw a transaction id: %w", err)
	}
	n, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("draw a transaction id: %w", err)
	}
	return uint64(n), nil //nolint:gosec // below 2^63 for centuries
}

// holder is a transaction whose end must be awaited before there can be another
// slot. The zero value is none.
type holder struct {
	xid  uint64
	life window.Life
}

// running is what is known of the transactions that run.
type running struct {
	// Xmin is the oldest, or Xmax if there is none.
	Xmin, Xmax int64
	// Age is that of the oldest whose age this role may see, in seconds, and Who
	// it is.
	Age float64
	Who string
}

func (s *Source) running(ctx context.Context) (running, error) {
	rows, err := s.config.DB.Query(ctx, s.queries.oldest)
	if err != nil {
		return running{}, fmt.Errorf("look for old transactions: %w", err)
	}
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[running])
	if err != nil {
		return running{}, fmt.Errorf("look for old transactions: %w", err)
	}
	return found, nil
}

// checkHolder returns errHolder while a slot's creation would have to wait.
func (s *Source) checkHolder(ctx context.Context, life window.Life) error {
	found, err := s.running(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	waits := s.holder.life == life && uint64(found.Xmin) <= s.holder.xid //nolint:gosec // below 2^63 for centuries
	if !waits {
		s.holder = holder{}
	}
	if waits || found.Age > oldTransaction.Seconds() {
		return fmt.Errorf("%w: %s holds transaction %d or an earlier one; a stream can begin when it has ended", errHolder, found.Who, found.Xmin)
	}
	return nil
}

// awaitHolder notes that the oldest running transaction must end first. Its age
// may be hidden from this role.
func (s *Source) awaitHolder(ctx context.Context, life window.Life, cause error) error {
	found, err := s.running(ctx)
	if err != nil {
		return errors.Join(cause, err)
	}
	if found.Xmin >= found.Xmax {
		return cause // it has ended meanwhile
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holder = holder{xid: uint64(found.Xmin), life: life} //nolint:gosec // below 2^63 for centuries
	return fmt.Errorf("%w: %s holds transaction %d or an earlier one; a stream can begin when it has ended", errHolder, found.Who, found.Xmin)
}

// pinned is what a slot keeps, and the oldest running transaction.
type pinned struct {
	Bytes, Xmin, Xmax int64
}

// pinned looks at the slot; errOtherServer says that there is none.
func (s *Source) pinned(ctx context.Context, db DB, slot string) (pinned, error) {
	rows, err := db.Query(ctx, s.queries.pinned, slot)
	if err != nil {
		return pinned{}, fmt.Errorf("look at the slot: %w", err)
	}
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[pinned])
	if errors.Is(err, pgx.ErrNoRows) {
		return pinned{}, fmt.Errorf("%w: the slot is not where messages are read", errOtherServer)
	}
	if err != nil {
		return pinned{}, fmt.Errorf("look at the slot: %w", err)
	}
	return found, nil
}

// checkPinned returns errPinned when the slot keeps too much WAL, because a
// transaction has been running for long: it must end before there is another
// slot, which it would pin just so. Without one the slot moves on every quarter
// of a minute, when the server logs which transactions run, so it may keep more
// for that long on a server that writes much.
func (s *Source) checkPinned(ctx context.Context, of *session) error {
	limited, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	// By way of the pool, which readers use: it must lead to the same server.
	slot, err := s.pinned(limited, s.config.DB, of.slot)
	if err != nil && limited.Err() != nil {
		return nil // the pool was busy: nothing is known
	}
	if err != nil {
		return err
	}
	bytes, xmin, xmax := slot.Bytes, slot.Xmin, slot.Xmax
	of.mu.Lock()
	if oldest := uint64(xmin); oldest != of.oldest { //nolint:gosec // below 2^63 for centuries
		of.oldest, of.oldestSince = oldest, time.Now()
	}
	long := xmin < xmax && time.Since(of.oldestSince) >= oldTransaction
	of.mu.Unlock()
	switch {
	case bytes > s.config.MaxPinned && long:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.holder = holder{xid: uint64(xmin), life: of.base.life} //nolint:gosec // below 2^63 for centuries
		return fmt.Errorf("%w: %w: %d bytes since transaction %d began", errHolder, errPinned, bytes, xmin)
	case bytes > pinnedFactor*s.config.MaxPinned:
		return fmt.Errorf("%w: %d bytes, and the server is behind", errPinned, bytes)
	}
	return nil
}
