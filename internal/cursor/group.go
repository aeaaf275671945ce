package cursor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

// Why a group is not moved or removed.
var (
	// ErrBeyond is returned for an id that is yet to be drawn.
	ErrBeyond = errors.New("no message has that id yet")
	// ErrNoEra is returned for an era that is neither the server's nor that of any
	// stored message or position.
	ErrNoEra = errors.New("no message is of that era")
	// ErrSkips is returned when messages would be skipped that were not delivered.
	ErrSkips = errors.New("messages would be skipped that were not delivered")
	// ErrSubscribed is returned when a living process is subscribed.
	ErrSubscribed = errors.New("a living process is subscribed")
)

// lockRetry is the pause before locks are tried for again that somebody else has:
// a checkpoint, for some milliseconds.
var lockRetry = backoff.Policy{Min: 5 * time.Millisecond, Max: 200 * time.Millisecond}

// Groups runs the statements by which people look at consumer groups, and move
// and remove them. It is safe for concurrent use.
type Groups struct {
	seekOne, seekMany, list, drop, log string
	lock, dropLock                     string
}

// NewGroups returns the statements for one schema.
func NewGroups(schemaName string) *Groups {
	read := func(file string) string {
		content, err := queries.ReadFile("queries/" + file + ".sql")
		if err != nil {
			panic(err) // embedded: cannot be missing
		}
		return string(content)
	}
	// What is read is the topics of a position, k, instead of a parameter.
	topics := strings.NewReplacer("$1::text[]", "k.patterns", "$1::text", "k.topic")
	undelivered := func(rows string, many bool) string {
		return strings.ReplaceAll(topics.Replace(window.Fill(read("undelivered"), many, time.Time{})), ":rows", rows)
	}
	// Filled before they are put in, so that the parameters of the whole stay.
	seek := func(many bool) string {
		chosen := topics.Replace(window.Fill(":chosen", many, time.Time{}))
		text := strings.ReplaceAll(read("seek"), ":chosen", chosen)
		text = strings.NewReplacer(":positions", read("positions"), ":undelivered", undelivered("$7::bigint", many)).Replace(text)
		return schema.Text(schemaName, window.Fill(text, many, time.Time{}))
	}
	list := strings.NewReplacer(
		":positions", read("positions"), ":one", undelivered("$7::bigint", false), ":many", undelivered("$7::bigint", true),
	).Replace(read("groups"))
	text := func(file string) string { return schema.Text(schemaName, read(file)) }
	return &Groups{
		seekOne: seek(false), seekMany: seek(true), list: schema.Text(schemaName, list), drop: text("drop"), log: text("group_log"),
		lock: text("lock"), dropLock: text("drop_lock"),
	}
}

// Actor is who does something, and why.
type Actor struct {
	Name, Reason string
}

// To is where a group is moved: earliest, latest, id (of Era, 0 for the server's
// own) or time.
type To struct {
	Kind    string
	Era, ID int64
	Time    time.Time
}

// Seek says what is to be moved, and how.
type Seek struct {
	Topic Topic
	To    To
	// Count is how many messages are counted at most.
	Count int64
	// Skip allows messages to be skipped that were not delivered.
	Skip bool
	// Retries removes the deferred retries of the topic.
	Retries bool
	Actor   Actor
}

// Sought is what a move means.
type Sought struct {
	// Again and Skipped count messages that were delivered and come again, and
	// that were not and do not come. Exact says that there were no more than could
	// be counted.
	Again, Skipped int64
	Exact          bool
	// Retries is how many deferred retries wait.
	Retries int64
	// Top is the last id that was drawn.
	Top int64
	// Holders are the processes that hold one of the cursors.
	Holders []string
}

// Preview says what a move would mean, and changes nothing.
func (g *Groups) Preview(ctx context.Context, db Querier, seek Seek) (Sought, error) {
	return g.seek(ctx, db, seek, false)
}

// Seek moves the cursors of a topic. Their holders lose them.
func (g *Groups) Seek(ctx context.Context, db Beginner, seek Seek) (sought Sought, err error) {
	err = locked(ctx, db, g.lock, []any{seek.Topic.Group, seek.Topic.Topic}, func(tx pgx.Tx) error {
		sought, err = g.seek(ctx, tx, seek, true)
		return err
	})
	return sought, err
}

func (g *Groups) seek(ctx context.Context, db Querier, seek Seek, move bool) (Sought, error) {
	text := g.seekOne
	if seek.Topic.Topic == "" {
		text = g.seekMany
	}
	var moment *time.Time
	if !seek.To.Time.IsZero() {
		moment = &seek.To.Time
	}
	rows, err := db.Query(ctx, text, seek.Topic.Group, seek.Topic.Topic, seek.To.Kind, seek.To.Era, seek.To.ID, moment,
		seek.Count, move, seek.Skip, seek.Retries, seek.Actor.Name, seek.Actor.Reason)
	if err != nil {
		return Sought{}, fmt.Errorf("move cursors of %s: %w", seek.Topic, err)
	}
	var problem string
	sought, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (s Sought, err error) {
		err = row.Scan(&problem, &s.Again, &s.Skipped, &s.Exact, &s.Retries, &s.Top, &s.Holders)
		return s, err
	})
	if err != nil {
		return Sought{}, fmt.Errorf("move cursors of %s: %w", seek.Topic, err)
	}
	return sought, problems[problem]
}

var problems = map[string]error{
	"unknown": ErrUnknown, "era": ErrNoEra, "beyond": ErrBeyond, "skips": ErrSkips, "subscribed": ErrSubscribed,
}

// Drop says what is to be removed.
type Drop struct {
	Group string
	// All means all topics, and otherwise Topic.
	All   bool
	Topic string
	// Force removes although somebody is subscribed. Beat is how long a beat counts.
	Force bool
	Beat  time.Duration
	Actor Actor
}

// Dropped is what was removed.
type Dropped struct {
	Topics, Cursors, Retries int64
	// Subscribed are the living processes that are.
	Subscribed []Subscribed
}

// Subscribed is a living process with a subscription.
type Subscribed struct {
	Holder string `json:"holder"`
	Host   string `json:"host"`
	PID    int    `json:"pid"`
	Topic  string `json:"topic"`
}

// PreviewDrop says what would be removed, and removes nothing.
func (g *Groups) PreviewDrop(ctx context.Context, db Querier, drop Drop) (Dropped, error) {
	return g.dropOnce(ctx, db, drop, false)
}

// Drop removes cursors of a group.
func (g *Groups) Drop(ctx context.Context, db Beginner, drop Drop) (dropped Dropped, err error) {
	err = locked(ctx, db, g.dropLock, []any{drop.Group, drop.All, drop.Topic}, func(tx pgx.Tx) error {
		dropped, err = g.dropOnce(ctx, tx, drop, true)
		return err
	})
	return dropped, err
}

func (g *Groups) dropOnce(ctx context.Context, db Querier, drop Drop, remove bool) (Dropped, error) {
	rows, err := db.Query(ctx, g.drop, drop.Group, drop.All, drop.Topic, remove, drop.Force, drop.Beat.Seconds(), drop.Actor.Name, drop.Actor.Reason)
	if err != nil {
		return Dropped{}, fmt.Errorf("remove cursors of group %q: %w", drop.Group, err)
	}
	var problem, subscribed string
	dropped, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (d Dropped, err error) {
		err = row.Scan(&problem, &d.Topics, &d.Cursors, &d.Retries, &subscribed)
		return d, err
	})
	if err == nil {
		err = json.Unmarshal([]byte(subscribed), &dropped.Subscribed)
	}
	if err != nil {
		return Dropped{}, fmt.Errorf("remove cursors of group %q: %w", drop.Group, err)
	}
	return dropped, problems[problem]
}

// locked runs work in a transaction that has locked cursors, with a statement that
// does not wait: whoever waits for one cursor while it has another, as checkpoints
// do in any order, would wait in a circle. It tries until the context ends.
func locked(ctx context.Context, db Beginner, lock string, args []any, work func(tx pgx.Tx) error) error {
	for try := 1; ; try++ {
		err := lockedOnce(ctx, db, lock, args, work)
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != lockNotAvailable || !backoff.Wait(ctx, lockRetry.Delay(try)) {
			return err
		}
	}
}

func lockedOnce(ctx context.Context, db Beginner, lock string, args []any, work func(tx pgx.Tx) error) error {
	// The statements of work see what was stored before the locks were held.
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return fmt.Errorf("lock cursors: %w", err)
	}
	defer func() {
		rollback, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		_ = tx.Rollback(rollback) // after a commit it does nothing
	}()
	if _, err := tx.Exec(ctx, lock, args...); err != nil {
		return fmt.Errorf("lock cursors: %w", err)
	}
	if err := work(tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("change cursors: %w", err)
	}
	return nil
}

// Page is a part of a list of groups.
type Page struct {
	// Group, if not "", is the only one. All means all topics, and otherwise Topic.
	Group string
	All   bool
	Topic string
	// After is what the page comes after.
	After Topic
	Limit int
	// Count is how many messages of each cursor are counted at most.
	Count int64
}

// Standing is how far a cursor is.
type Standing struct {
	Key          Key
	Patterns     []string
	Base, Shards int
	// Changing says that the number of shards is.
	Changing bool
	// Left is how many messages are not delivered, of which Oldest is the oldest,
	// as far as they were counted; Exact says that they were. Holes is how many of
	// them were handed out and are not in Left.
	Left   int64
	Exact  bool
	Oldest *time.Time
	Holes  int64
	// Updated is when the position was stored, Now the time, by the same clock.
	Updated, Now time.Time
	Holder, Host string
	PID          int
	Beat         *time.Time
}

// List returns how far groups are.
func (g *Groups) List(ctx context.Context, db Querier, page Page) ([]Standing, error) {
	rows, err := db.Query(ctx, g.list, page.Group, page.All, page.Topic, page.After.Group, page.After.Topic, page.Limit, page.Count)
	if err != nil {
		return nil, fmt.Errorf("look at groups: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Standing, err error) {
		err = row.Scan(&s.Key.Group, &s.Key.Topic, &s.Patterns, &s.Key.Shard, &s.Base, &s.Shards, &s.Changing,
			&s.Left, &s.Exact, &s.Oldest, &s.Holes, &s.Updated, &s.Now, &s.Holder, &s.Host, &s.PID, &s.Beat)
		return s, err
	})
	if err != nil {
		return nil, fmt.Errorf("look at groups: %w", err)
	}
	return list, nil
}

// Event is an entry of the log of groups.
type Event struct {
	ID     int64
	At     time.Time
	Action string
	Actor  Actor
	Topic  Topic
	Detail []byte
}

// Log returns entries behind an id, by ascending id, of one group or, for "", of
// all.
func (g *Groups) Log(ctx context.Context, db Querier, group string, after int64, limit int) ([]Event, error) {
	rows, err := db.Query(ctx, g.log, group, after, limit)
	if err != nil {
		return nil, fmt.Errorf("read the log of groups: %w", err)
	}
	events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Event, err error) {
		var detail string
		err = row.Scan(&e.ID, &e.At, &e.Action, &e.Actor.Name, &e.Actor.Reason, &e.Topic.Group, &e.Topic.Topic, &detail)
		e.Detail = []byte(detail)
		return e, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the log of groups: %w", err)
	}
	return events, nil
}
