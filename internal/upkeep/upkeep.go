package upkeep

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

// DefaultRetention is how long a partition stays after all of it was delivered, if
// nothing else is said; the partition interval if that is longer.
const DefaultRetention = 3 * time.Hour

const (
	// lease is how long a process that died in the middle of a pass keeps others
	// from one.
	lease = 10 * time.Second
	// batch is how many rows a transaction deletes or moves at most.
	batch = 1000
	// maxStrays is how many batches are published again of a partition in a pass.
	maxStrays = 50
	// unarchived is what upkeep_delete has seen where the archive comes first.
	unarchived = -1
	// longTimeout bounds what reads all of the DEFAULT partition, and holds no
	// lock that anybody would wait for.
	longTimeout = 10 * time.Minute
	// firstPass is how long after the start the first pass comes at most.
	firstPass = 3 * time.Second
)

// retry is the pause after a pass that could not go on.
var retry = backoff.Policy{Min: time.Second, Max: time.Minute}

// Config of an Upkeep; all of it is needed but what may be 0 or nil.
type Config struct {
	Schema string
	// Holder names the process.
	Holder string
	// Interval is the time between two passes, over all processes.
	Interval time.Duration
	// Retention is how long a partition stays after all of it was delivered; 0 for
	// the default.
	Retention time.Duration
	// SealDelay is by how much a range must have passed before its partition is
	// sealed.
	SealDelay time.Duration
	// UnreadRetention is how long messages stay of topics that nobody has ever
	// subscribed to, while there are others. 0 for ever.
	UnreadRetention time.Duration
	// InboxRetention and DeadLetterRetention are how long those rows stay. 0 for
	// ever.
	InboxRetention, DeadLetterRetention time.Duration
	// Archive, if not nil, is given each partition before it is emptied.
	Archive Archive
	// Timeout bounds each statement that is short.
	Timeout time.Duration
	// Open makes the connection for a pass.
	Open func() Session
	// Failed is told of each statement that could not be run.
	Failed func(err error)
	Logger watermill.LoggerAdapter
}

// Status is how the upkeep stands, as this process saw it the last time.
type Status struct {
	// At is when, by this process's clock; zero if it has not looked yet.
	At time.Time
	// Ran says that this process had the lease then.
	Ran bool
	// Err is why it could not look, or not go on.
	Err error
	// Partitions are in the order of their ranges, the DEFAULT one last.
	Partitions []Partition
	// Problems are what the last pass of this process found.
	Problems []*Problem
	// Postponed are steps whose locks were not to be had.
	Postponed []string
}

// Upkeep makes passes. Safe for concurrent use.
type Upkeep struct {
	config Config
	table  table

	// passing holds a value while a pass is made, which sightings belong to.
	passing   chan struct{}
	sightings sightings

	mu     sync.Mutex
	status Status
	told   map[string]bool
}

// New returns an upkeep whose lease is kept through db.
func New(db Querier, config Config) *Upkeep {
	return &Upkeep{
		config: config, table: table{db: db, schema: config.Schema, timeout: config.Timeout},
		passing: make(chan struct{}, 1), sightings: sightings{}, told: map[string]bool{},
	}
}

// Status returns how things stood at the last pass. It asks no database.
func (u *Upkeep) Status() Status {
	u.mu.Lock()
	defer u.mu.Unlock()
	status := u.status
	status.Partitions, status.Problems, status.Postponed = slices.Clone(status.Partitions), slices.Clone(status.Problems), slices.Clone(status.Postponed)
	return status
}

// Run makes passes until the context ends. The first one comes soon, however often
// the process is started.
func (u *Upkeep) Run(ctx context.Context) {
	pause := backoff.Policy{Min: min(firstPass, u.config.Interval)}.Delay(1)
	failures := 0
	for backoff.Wait(ctx, pause) {
		err := u.Pass(ctx, false)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			failures++
			pause = retry.Delay(failures)
			u.config.Failed(err)
			u.config.Logger.Error("Upkeep of the outbox failed; trying again", err, watermill.LogFields{"failures": failures, "retry_in": pause.String()})
		default:
			failures = 0
			pause = backoff.Policy{Min: u.config.Interval}.Delay(1)
		}
	}
}

// Pass does what there is to do, or nothing if another process is at it, or, unless
// it is asked for now, was a moment ago. It returns what kept it from going on; what
// else is not as it should be is in Status.
func (u *Upkeep) Pass(ctx context.Context, now bool) (err error) {
	select {
	case u.passing <- struct{}{}:
		defer func() { <-u.passing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	p := &pass{Upkeep: u, status: Status{At: time.Now()}}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
		p.status.Err = err
		u.finish(p)
	}()
	var rest time.Duration
	if !now {
		rest = u.config.Interval * 3 / 4
	}
	word, err := u.table.begin(ctx, u.config.Holder, lease, rest)
	if err != nil {
		return fmt.Errorf("begin the upkeep: %w", err)
	}
	if p.status.Ran = word == "mine"; !p.status.Ran {
		p.status.Partitions, err = u.table.partitions(ctx, u.config.SealDelay)
		return err
	}
	p.session = u.config.Open()
	defer p.session.Close()
	p.table = table{db: p.session, schema: u.config.Schema, timeout: u.config.Timeout}
	held, lost := context.WithCancelCause(ctx)
	beating := make(chan struct{})
	go func() {
		defer close(beating)
		u.renew(held, lost)
	}()
	err = p.run(held)
	if cause := context.Cause(held); err != nil && errors.Is(err, context.Canceled) && cause != nil {
		err = cause
	}
	lost(context.Canceled)
	<-beating
	if err == nil {
		p.status.Partitions, err = u.table.partitions(ctx, u.config.SealDelay)
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if failed := u.table.end(ending, u.config.Holder, err == nil); err == nil && failed != nil && ctx.Err() == nil {
		err = fmt.Errorf("end the upkeep: %w", failed)
	}
	return err
}

// errLost ends a pass whose lease somebody else has.
var errLost = errors.New("another process has taken over the upkeep")

// renew keeps the lease until the context ends, or ends it.
func (u *Upkeep) renew(ctx context.Context, lost context.CancelCauseFunc) {
	for backoff.Wait(ctx, lease/3) {
		word, err := u.table.begin(ctx, u.config.Holder, lease, 0)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			// Each step is safe without the lease.
		case word != "mine" && word != "working":
			lost(errLost)
			return
		}
	}
}

// finish keeps the status of a pass, and logs what was not there at the one before.
func (u *Upkeep) finish(p *pass) {
	u.mu.Lock()
	if !p.status.Ran || p.status.Err != nil {
		// What was found before still stands, as far as is known.
		p.status.Problems = append(p.status.Problems, u.status.Problems...)
		if p.status.Partitions == nil {
			p.status.Partitions = u.status.Partitions
		}
	}
	u.status = p.status
	told := map[string]bool{}
	var news []*Problem
	for _, problem := range p.status.Problems {
		text := problem.Error()
		if !u.told[text] && !told[text] {
			news = append(news, problem)
		}
		told[text] = true
	}
	u.told = told
	u.mu.Unlock()
	for _, problem := range news {
		u.config.Logger.Error("Upkeep of the outbox: something is not as it should be", problem, watermill.LogFields{"object": problem.Object})
	}
}
