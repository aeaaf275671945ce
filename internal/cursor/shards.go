package cursor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/window"
)

// lockNotAvailable is the SQLSTATE of a lock that somebody else has.
const lockNotAvailable = "55P03"

// rollbackTimeout bounds the end of a transaction that failed.
const rollbackTimeout = time.Second

// ErrUnknown is returned for a topic that a group has no cursors of.
var ErrUnknown = errors.New("the consumer group never subscribed to the topic")

// errChanging says that the number of shards changed again and again meanwhile.
var errChanging = errors.New("the number of shards is being changed by somebody else")

// Topic names what a consumer group's cursors are of, all of them together: a
// topic, or where that is "" the many topics that the group reads by one.
type Topic struct {
	Group string
	Topic string
}

// String returns the topic for logs and errors.
func (t Topic) String() string {
	if t.Topic == "" {
		return fmt.Sprintf("group %q, many topics", t.Group)
	}
	return fmt.Sprintf("group %q, topic %q", t.Group, t.Topic)
}

// Row is what a look says of a cursor.
type Row struct {
	Key          Key
	Base, Shards int
	// Ending says that cursors of a higher base wait for this one's end.
	Ending bool
	// Reshard is the number of shards that was asked for, 0 if none was.
	Reshard int
	// Patterns are those of its topics, nil for one topic.
	Patterns []string
	// Holder is "" if nobody holds it. Alive says that the holder has a beat.
	Holder string
	Alive  bool
}

// Member is a process that wants a topic, with so many subscriptions.
type Member struct {
	Holder        string
	Subscriptions int
}

// Look is how things stand with some topics.
type Look struct {
	Rows    []Row
	Members map[Topic][]Member
	// Beats are those of all holders and members.
	Beats map[string]int64
}

// Look returns how things stand with topics, or, without all, only which of their
// cursors are free.
func (s *Store) Look(ctx context.Context, db Querier, topics []Topic, all bool) (Look, error) {
	groups, names := topicColumns(topics)
	rows, err := db.Query(ctx, s.look, groups, names, s.holder, all)
	if err != nil {
		return Look{}, fmt.Errorf("look at cursors: %w", err)
	}
	look := Look{Members: map[Topic][]Member{}, Beats: map[string]int64{}}
	var row Row
	var subscriptions int
	var beat *int64
	if _, err := pgx.ForEachRow(rows, []any{
		&row.Key.Group, &row.Key.Topic, &row.Key.Shard, &row.Base, &row.Shards, &row.Ending, &row.Reshard, &subscriptions, &row.Holder, &beat, &row.Patterns,
	}, func() error {
		if row.Alive = beat != nil; row.Alive {
			look.Beats[row.Holder] = *beat
		}
		if subscriptions > 0 {
			topic := row.Key.Of()
			look.Members[topic] = append(look.Members[topic], Member{Holder: row.Holder, Subscriptions: subscriptions})
		} else {
			look.Rows = append(look.Rows, row)
		}
		return nil
	}); err != nil {
		return Look{}, fmt.Errorf("look at cursors: %w", err)
	}
	return look, nil
}

// Holder is the name that the process calls itself.
func (s *Store) Holder() string { return s.holder }

// Join says how many subscriptions want each of the topics, 0 for none any more.
func (s *Store) Join(ctx context.Context, db DB, wants map[Topic]int) error {
	var groups, names []string
	var subscriptions []int
	for topic, n := range wants {
		groups, names, subscriptions = append(groups, topic.Group), append(names, topic.Topic), append(subscriptions, n)
	}
	if _, err := db.Exec(ctx, s.join, s.holder, groups, names, subscriptions); err != nil {
		return fmt.Errorf("say what is wanted: %w", err)
	}
	return nil
}

// Bury removes dead processes, whose beats still are these, from the members.
func (s *Store) Bury(ctx context.Context, db DB, dead map[string]int64) error {
	holders, beats := deadColumns(dead)
	if _, err := db.Exec(ctx, s.bury, holders, beats); err != nil {
		return fmt.Errorf("remove dead members: %w", err)
	}
	return nil
}

// Reshard asks for another number of shards. It returns ErrUnknown for a topic
// without cursors.
func (s *Store) Reshard(ctx context.Context, db DB, topic Topic, shards int) error {
	// A change that is being made has ended the cursors that were seen, and its
	// new ones are seen by the next try.
	for range 10 {
		tag, err := db.Exec(ctx, s.reshard, topic.Group, topic.Topic, shards)
		if err != nil {
			return fmt.Errorf("ask for %d shards: %w", shards, err)
		}
		if tag.RowsAffected() > 0 {
			return nil
		}
		known, err := s.Known(ctx, db, topic)
		if err != nil {
			return err
		}
		if !known {
			return fmt.Errorf("%s: %w", topic, ErrUnknown)
		}
	}
	return fmt.Errorf("%s: %w", topic, errChanging)
}

// Known reports whether a topic has cursors.
func (s *Store) Known(ctx context.Context, db Querier, topic Topic) (bool, error) {
	rows, err := db.Query(ctx, s.exists, topic.Group, topic.Topic)
	if err != nil {
		return false, fmt.Errorf("look for cursors: %w", err)
	}
	known, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
	if err != nil {
		return false, fmt.Errorf("look for cursors: %w", err)
	}
	return known, nil
}

// Beginner begins a transaction.
type Beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Switch makes the change of the number of shards that was asked for, unless a
// living process holds one of them, somebody works on one right now, or the
// change has been made already. It reports whether it did.
func (s *Store) Switch(ctx context.Context, db Beginner, topic Topic, dead map[string]int64) (made bool, err error) {
	// Two statements, each with a snapshot of its own: the second one's must be
	// taken when the locks are held.
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return false, fmt.Errorf("change the number of shards: %w", err)
	}
	defer func() {
		rollback, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		_ = tx.Rollback(rollback) // after a commit it does nothing
	}()
	if _, err := tx.Exec(ctx, s.lock, topic.Group, topic.Topic); err != nil {
		var refused *pgconn.PgError
		if errors.As(err, &refused) && refused.Code == lockNotAvailable {
			return false, nil
		}
		return false, fmt.Errorf("lock cursors: %w", err)
	}
	holders, beats := deadColumns(dead)
	rows, err := tx.Query(ctx, s.change, topic.Group, topic.Topic, holders, beats)
	if err != nil {
		return false, fmt.Errorf("change the number of shards: %w", err)
	}
	n, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
	if err != nil {
		return false, fmt.Errorf("change the number of shards: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return false, fmt.Errorf("change the number of shards: %w", err)
	}
	return n > 0, nil
}

// Finish removes a cursor whose position has reached its end, instead of
// releasing it; what is unacked goes to those that follow. It reports whether it
// was still held.
func (s *Store) Finish(ctx context.Context, db DB, w Write) (bool, error) {
	holes := []byte("[]")
	if w.State.Holes != nil {
		var err error
		if holes, err = json.Marshal(w.State.Holes); err != nil {
			return false, fmt.Errorf("encode holes of %s: %w", w.Key, err)
		}
	}
	sql, topics := s.finishOne, any(w.Key.Topic)
	if w.Patterns != nil {
		sql, topics = s.finishMany, w.Patterns
	}
	rows, err := db.Query(ctx, sql, topics, s.holder, w.Key.Group, w.Key.Topic, w.Key.Shard, w.Epoch, w.Life.Era, w.Life.Boot, string(holes))
	if err != nil {
		return false, fmt.Errorf("end cursor: %w", err)
	}
	n, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
	if err != nil {
		return false, fmt.Errorf("end cursor: %w", err)
	}
	return n > 0, nil
}

// checkUntil reports an end that the server has not come to: its messages would
// be passed over in silence.
func checkUntil(until window.Until, life window.Life, now window.Snapshot) error {
	if until.Era == life.Era && until.C.Xmax() > now.Xmax() {
		return fmt.Errorf("column until is the snapshot %q, from the future of this server (%q)", until.C, now)
	}
	return nil
}

func topicColumns(topics []Topic) (groups, names []string) {
	for _, topic := range topics {
		groups, names = append(groups, topic.Group), append(names, topic.Topic)
	}
	return groups, names
}

func deadColumns(dead map[string]int64) (holders []string, beats []int64) {
	for holder, beat := range dead {
		holders, beats = append(holders, holder), append(beats, beat)
	}
	return holders, beats
}
