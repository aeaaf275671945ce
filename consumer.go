package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/lease"
	"github.com/millrace/watermill-outbox/internal/live"
	"github.com/millrace/watermill-outbox/internal/promote"
	"github.com/millrace/watermill-outbox/internal/upkeep"
	"github.com/millrace/watermill-outbox/internal/watch"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// DefaultMaxConns is the most connections a Consumer opens.
	DefaultMaxConns = 8
	// MinMaxConns leaves one connection for pages and positions beside the two
	// that are reserved, for the lease and for the WAL.
	MinMaxConns = 3

	// DefaultPollInterval is the longest time between two looks for messages.
	DefaultPollInterval = 100 * time.Millisecond
	// MinPollInterval keeps an idle process from loading the server.
	MinPollInterval = time.Millisecond
	// MaxPollInterval is where polling stops being one.
	MaxPollInterval = time.Minute

	// DefaultCheckpointInterval is the time between two writes of positions.
	DefaultCheckpointInterval = 250 * time.Millisecond

	// DefaultLease is how long a process that died without a word keeps others
	// waiting.
	DefaultLease = 10 * time.Second
	// MinLease leaves room for three renewals with a busy server.
	MinLease = time.Second

	// DefaultQueryTimeout bounds each statement of a Consumer.
	DefaultQueryTimeout = 15 * time.Second

	// promoteShare is how many poll intervals pass between two looks for messages
	// that have become due sooner than was known at the last one.
	promoteShare = 5
	// claimInterval is the time between two looks for cursors that another
	// process holds. A clean hand-over takes that long.
	claimInterval = 150 * time.Millisecond
	// lookInterval is how often each reader looks for messages by itself,
	// whatever the watcher says; it also moves the position of an idle topic.
	lookInterval = 30 * time.Second
	// idleCheckpoint is how often the positions of idle topics are stored.
	idleCheckpoint = time.Minute
	// sealsInterval is how often it is asked which partitions are sealed.
	sealsInterval = 30 * time.Second
)

// ConsumerConfig configures a Consumer. The zero value works.
type ConsumerConfig struct {
	// Schema is the schema the outbox tables live in. Defaults to
	// schema.DefaultName ("outbox").
	Schema string

	// Mode says where new messages are found: in the write-ahead log when that
	// is possible (ModeAuto), or by polling alone (ModePoll). Defaults to
	// ModeAuto, and with TransactionPooler to ModePoll.
	Mode Mode

	// TransactionPooler says that the pool configuration leads to a pooler that
	// lends its connections to the server for one transaction each, such as
	// PgBouncer with pool_mode=transaction. The Consumer then keeps nothing in its
	// sessions: each statement runs in a transaction of its own that brings the
	// settings it needs, still in one round trip. The server plans every statement
	// anew, which takes it some milliseconds each, and answers as text: small pages
	// and short poll intervals cost it much more than through a direct connection
	// (see docs/modes.md). The WAL cannot be read through a pooler:
	// Mode is ModePoll. Hooks of the pool configuration that set something for the
	// session are the caller's to leave out, as are start parameters that the
	// pooler refuses. The pooler must lend as many connections as are busy at once,
	// the lease's among them, which is lost when none comes in time. Defaults to
	// false: every connection is a session of its own on the server.
	TransactionPooler bool

	// MaxConns is the most connections this process uses for consuming,
	// however many subscribers hang on the Consumer; one of them is reserved
	// for the lease, and unless ModePoll is set one for the WAL, whose
	// replication connection comes on top (it counts against max_wal_senders).
	// They are none of the application's, so neither starves the other. More
	// help when many topics are busy at once. At least MinMaxConns. Defaults to
	// DefaultMaxConns.
	MaxConns int

	// LiveBytes bounds the memory for messages that came from the WAL and were
	// not taken by their subscriptions yet. When it is used up the subscription
	// with the most goes back to the table, so too little makes subscriptions
	// leave the WAL at every burst, and too much only costs memory while
	// handlers are slow. At least MinLiveBytes. Defaults to DefaultLiveBytes.
	LiveBytes int

	// MaxSlotWAL is how many bytes of WAL the server may have to keep for the
	// stream's replication slot, which a long transaction anywhere on the server
	// pins. Beyond it the slot is given up until that transaction has ended.
	// Without one the slot moves on about every 15 s, whatever was written
	// meanwhile; then four times as much is allowed. Too little gives up the WAL for transactions that are nothing special, too
	// much fills the server's disk. At least MinMaxSlotWAL. Defaults to
	// DefaultMaxSlotWAL.
	MaxSlotWAL int64

	// PollInterval is the longest time between two looks for new messages: one
	// statement per process, whatever the number of topics. It is the delay a
	// message sees after a quiet time; after news the looks come up to ten
	// times as often, and a backlog is read without any pause. Scheduled
	// messages are looked for by a statement of their own, as often. Shorter
	// costs the server more statements while idle. Between MinPollInterval and
	// MaxPollInterval. Defaults to DefaultPollInterval.
	PollInterval time.Duration

	// CheckpointInterval is the time between two writes of the positions that
	// moved, in one statement for all topics. What was acked since the last
	// one is delivered again after a crash (never after Close). Shorter
	// repeats less and writes more. Defaults to DefaultCheckpointInterval.
	CheckpointInterval time.Duration

	// Lease is how long the process may be out of touch with the database
	// before others take over its topics, and so how long they wait when it
	// dies. It is renewed three times as often. Longer survives longer
	// interruptions without a hand-over. The same in all processes of an
	// outbox, at least MinLease. Defaults to DefaultLease.
	Lease time.Duration

	// QueryTimeout bounds each statement, so that a stalled one cannot stop a
	// subscriber for ever; it is tried again. Defaults to DefaultQueryTimeout.
	QueryTimeout time.Duration

	// Maintenance is how this process takes part in the upkeep of the outbox, which
	// one process does at a time. The one that is at it has one connection more for
	// the while. The zero value works.
	Maintenance MaintenanceConfig
}

func (c ConsumerConfig) withDefaults() ConsumerConfig {
	c.Schema = cmp.Or(c.Schema, schema.DefaultName)
	if c.TransactionPooler {
		c.Mode = cmp.Or(c.Mode, ModePoll)
	}
	c.Mode = cmp.Or(c.Mode, ModeAuto)
	c.MaxConns = cmp.Or(c.MaxConns, DefaultMaxConns)
	c.LiveBytes = cmp.Or(c.LiveBytes, DefaultLiveBytes)
	c.MaxSlotWAL = cmp.Or(c.MaxSlotWAL, DefaultMaxSlotWAL)
	c.PollInterval = cmp.Or(c.PollInterval, DefaultPollInterval)
	c.CheckpointInterval = cmp.Or(c.CheckpointInterval, DefaultCheckpointInterval)
	c.Lease = cmp.Or(c.Lease, DefaultLease)
	c.QueryTimeout = cmp.Or(c.QueryTimeout, DefaultQueryTimeout)
	c.Maintenance = c.Maintenance.withDefaults()
	return c
}

func (c ConsumerConfig) validate() error {
	if err := schema.ValidateName(c.Schema); err != nil {
		return fmt.Errorf("outbox: ConsumerConfig.Schema: %w", err)
	}
	switch {
	case c.Mode != ModeAuto && c.Mode != ModePoll && c.Mode != ModeWAL:
		return fmt.Errorf("outbox: ConsumerConfig.Mode must be %q, %q or %q, is %q", ModeAuto, ModePoll, ModeWAL, c.Mode)
	case c.TransactionPooler && c.Mode != ModePoll:
		return fmt.Errorf("outbox: ConsumerConfig.Mode must be %q with TransactionPooler, is %q: the WAL is read through a replication connection, "+
			"which no transaction pooler carries; poll, or connect the Consumer to the server directly", ModePoll, c.Mode)
	case c.LiveBytes < MinLiveBytes:
		return fmt.Errorf("outbox: ConsumerConfig.LiveBytes must be at least %d, is %d", MinLiveBytes, c.LiveBytes)
	case c.MaxSlotWAL < MinMaxSlotWAL:
		return fmt.Errorf("outbox: ConsumerConfig.MaxSlotWAL must be at least %d, is %d", MinMaxSlotWAL, c.MaxSlotWAL)
	case c.MaxConns < MinMaxConns:
		return fmt.Errorf("outbox: ConsumerConfig.MaxConns must be at least %d, is %d", MinMaxConns, c.MaxConns)
	case c.PollInterval < MinPollInterval || c.PollInterval > MaxPollInterval:
		return fmt.Errorf("outbox: ConsumerConfig.PollInterval must be between %s and %s, is %s", MinPollInterval, MaxPollInterval, c.PollInterval)
	case c.CheckpointInterval < time.Millisecond:
		return fmt.Errorf("outbox: ConsumerConfig.CheckpointInterval must be at least 1ms, is %s", c.CheckpointInterval)
	case c.Lease < MinLease:
		return fmt.Errorf("outbox: ConsumerConfig.Lease must be at least %s, is %s", MinLease, c.Lease)
	case c.CheckpointInterval > c.Lease:
		return fmt.Errorf("outbox: ConsumerConfig.CheckpointInterval (%s) must not be longer than Lease (%s)", c.CheckpointInterval, c.Lease)
	case c.QueryTimeout < 10*time.Millisecond:
		return fmt.Errorf("outbox: ConsumerConfig.QueryTimeout must be at least 10ms, is %s", c.QueryTimeout)
	}
	return c.Maintenance.validate("ConsumerConfig.Maintenance")
}

// Consumer is one process's side of reading an outbox: it owns the connections,
// the watcher that looks for new messages, the stream from the WAL, and the process's lease, and shares
// them among any number of Subscribers, which are cheap. Make one per process
// and database, and close it last. It is safe for concurrent use.
type Consumer struct {
	config ConsumerConfig
	logger watermill.LoggerAdapter
	pool   *pgxpool.Pool
	// db is what the statements run on: the pool, in one way or another.
	db   database
	beat *reservedConn
	// prepare is the user's hook before a connection is made, or nil.
	prepare func(context.Context, *pgx.ConnConfig) error
	gate    *gate
	queries *window.Queries
	seals   *window.Seals
	store   *cursor.Store
	watcher *watch.Watcher
	// promoter moves deferred messages into the log when they are due.
	promoter *promote.Promoter
	// upkeep is nil where it is switched off.
	upkeep *upkeep.Upkeep
	leases *lease.Manager
	// barrier and live are nil with ModePoll.
	barrier   *reservedConn
	live      *live.Source
	walProven atomic.Bool // a replication connection could be opened
	since     time.Time
	// alone holds a value while a message is out that may have ended a process.
	alone chan struct{}

	// background ends the watcher, the promoter, the upkeep and the leases; done is closed when
	// they have ended.
	background context.Context //nolint:containedctx // the Consumer's own lifetime
	stop       context.CancelFunc
	running    sync.WaitGroup

	mu          sync.Mutex
	started     bool
	closed      bool
	subscribers map[*Subscriber]struct{}
	// subscriptions are the open ones.
	subscriptions map[*subscription]struct{}
	closeErr      error
	closeDone     chan struct{}
}

// NewConsumer connects to the database that the pool configuration names, with
// a pool of its own; the configuration is copied, so that
//
//	outbox.NewConsumer(pool.Config(), outbox.ConsumerConfig{}, logger)
//
// consumes from the application's database beside the application's pool. The
// installation is checked at once, for at most ten seconds: a wrong address,
// missing tables (ErrNotInstalled), another version (*schema.VersionError), a
// read-only server (ErrReadOnly), a row-level security policy (ErrRowSecurity),
// a missing privilege and whatever schema.Check calls an error are reported
// here; its warnings are logged. Nothing runs in the background before the
// first Subscribe. A nil logger logs nothing.
func NewConsumer(db *pgxpool.Config, config ConsumerConfig, logger watermill.LoggerAdapter) (*Consumer, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	if db == nil {
		return nil, errors.New("outbox: NewConsumer needs a pool configuration, such as pool.Config() or one from pgxpool.ParseConfig")
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	poolConfig := consumerPool(db, config)
	gate := newGate(poolConfig.ConnConfig.DialFunc)
	prepare := poolConfig.BeforeConnect
	poolConfig.BeforeConnect = guardedBy(gate, prepare, false)
	// The lease is tried for by its own clock, or it would be lost in an outage
	// that it could survive; when it comes through the gate is open for all.
	beatConfig := poolConfig.Copy()
	beatConfig.BeforeConnect = guardedBy(gate, prepare, true)
	ctx, cancel := context.WithTimeout(context.Background(), constructTimeout)
	defer cancel()
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, fmt.Errorf("outbox: new consumer: %w", err)
	}
	statements := databaseOn(pool, config)
	if err := checkConsumer(ctx, statements, config.Schema, logger); err != nil {
		pool.Close()
		if sqlState(err) == stateProtocol && !config.TransactionPooler {
			return nil, fmt.Errorf("outbox: new consumer: %w (if this is a transaction pooler, such as PgBouncer, set ConsumerConfig.TransactionPooler)", err)
		}
		return nil, fmt.Errorf("outbox: new consumer: %w", err)
	}
	if err := config.Maintenance.checkRetention(ctx, statements, config.Schema, "ConsumerConfig.Maintenance"); err != nil {
		pool.Close()
		return nil, err
	}
	c := &Consumer{
		config: config, logger: logger, pool: pool, db: statements, prepare: prepare, gate: gate,
		beat:    &reservedConn{config: beatConfig, transactions: config.TransactionPooler},
		queries: window.NewQueries(config.Schema), seals: &window.Seals{},
		store:       cursor.NewStore(config.Schema, uuid.NewString()),
		subscribers: map[*Subscriber]struct{}{}, subscriptions: map[*subscription]struct{}{},
		since: time.Now(), alone: make(chan struct{}, 1), closeDone: make(chan struct{}),
	}
	c.background, c.stop = context.WithCancel(context.Background())
	c.watcher = watch.New(statements, watch.Config{
		Schema: config.Schema, Interval: config.PollInterval, Timeout: config.QueryTimeout, Seals: c.seals, Failed: c.failed, Logger: logger,
		Shared: func() (groups, topics []string) { return c.leases.Shared() },
		Free:   func() { c.leases.Stir() },
	})
	c.promoter = promote.New(statements, promote.Config{
		Schema: config.Schema, Interval: promoteShare * config.PollInterval, Timeout: config.QueryTimeout, Failed: c.failed, Logger: logger,
	})
	c.leases = lease.New(c.store, statements, c.beat, lease.Config{
		Duration: config.Lease, Claim: claimInterval,
		Checkpoint: config.CheckpointInterval, IdleCheckpoint: idleCheckpoint,
		Timeout: config.QueryTimeout, Failed: c.failed, Logger: logger,
		Told: func() bool { return config.PollInterval <= claimInterval && c.watcher.Looking() },
	})
	if !config.Maintenance.Disabled {
		settings := config.Maintenance.upkeep(config.Schema, c.store.Holder(), config.QueryTimeout, logger)
		settings.Failed = c.failed
		settings.Open = func() upkeep.Session {
			return &upkeepSession{&reservedConn{config: poolConfig, transactions: config.TransactionPooler}}
		}
		c.upkeep = upkeep.New(statements, settings)
	}
	if config.Mode != ModePoll {
		c.barrier = &reservedConn{config: poolConfig, limit: barrierConnect}
		c.live = c.newSource()
	}
	return c, nil
}

// opened and ended keep the list of subscriptions.
func (c *Consumer) opened(s *subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subscriptions[s] = struct{}{}
}

func (c *Consumer) ended(s *subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.subscriptions, s)
}

// register adds a subscriber, and starts the background with the first.
func (c *Consumer) register(s *Subscriber) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrSubscriberClosed
	}
	c.subscribers[s] = struct{}{}
	return nil
}

func (c *Consumer) unregister(s *Subscriber) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.subscribers, s)
}

// start begins the background work, once.
func (c *Consumer) start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.started || c.closed {
		return
	}
	c.started = true
	c.running.Go(func() { c.watcher.Run(c.background) })
	c.running.Go(c.followSeals)
	c.running.Go(func() { c.promoter.Run(c.background) })
	c.running.Go(func() { c.leases.Run(c.background) })
	if c.upkeep != nil {
		c.running.Go(func() { c.upkeep.Run(c.background) })
	}
	if c.live != nil {
		c.running.Go(func() { c.live.Run(c.background) })
	}
}

// Close closes all Subscribers, gives up what the process holds and closes the
// connections. It takes as long as the longest grace period (see
// SubscriberConfig.CloseTimeout) plus a few statements; if the database does not
// answer that is their time limits, and some 15 seconds in which pgx takes leave of
// each connection. It may be called more than once; later calls wait for the first.
func (c *Consumer) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		<-c.closeDone
		return c.closeErr
	}
	c.closed = true
	started := c.started
	subscribers := make([]*Subscriber, 0, len(c.subscribers))
	for s := range c.subscribers {
		subscribers = append(subscribers, s)
	}
	c.mu.Unlock()
	defer close(c.closeDone)

	// In this order: nothing is handed out any more and the last positions are
	// stored; then the upkeep ends; then the process's row goes.
	var wg sync.WaitGroup
	for _, s := range subscribers {
		wg.Go(func() { _ = s.Close() }) // always nil
	}
	wg.Wait()
	c.stop()
	c.running.Wait()
	if started {
		ctx, cancel := context.WithTimeout(context.Background(), min(c.config.QueryTimeout, releaseTimeout))
		defer cancel()
		if err := c.leases.Close(ctx); err != nil {
			// Others wait for the lease to run out; nothing is lost.
			c.logger.Error("Cannot give up the lease of this process", err, nil)
		}
	}
	c.beat.close()
	if c.barrier != nil {
		c.barrier.close()
	}
	c.pool.Close()
	return c.closeErr
}
