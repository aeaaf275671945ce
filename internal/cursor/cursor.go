// Package cursor keeps the rows of cursors and processes: who holds a consumer
// group's position in a topic, and the position itself.
//
// # Leases
//
// A process has one row in processes, whose beat it renews; a cursor names its
// holder and an epoch. A candidate takes a cursor when it has no holder, or
// when the holder's beat has not changed for (nine tenths of) the lease time on
// the candidate's own monotonic clock: no two clocks are ever compared, and none
// of the database's. Taking raises the
// epoch, and every later write names the epoch it belongs to, so that a holder
// which was merely asleep can store nothing when it wakes. Writes update; they
// never insert, so a cursor that was removed stays removed.
//
// There are no session-level locks: they would be lost with a connection, and
// do not work behind a transaction pooler.
package cursor

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/metadata"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

//go:embed queries/*.sql
var queries embed.FS

// ErrBadCursor is matched by the error of a cursor whose row cannot be a
// position: it was edited, or copied from another server.
var ErrBadCursor = errors.New("cursor row is not a position: restore it, or delete it and subscribe again to start over")

// Key names a cursor.
type Key struct {
	Group string
	Topic string
	Shard int
}

// Of returns whose cursor it is.
func (k Key) Of() Topic { return Topic{Group: k.Group, Topic: k.Topic} }

// String returns the key for logs and errors.
func (k Key) String() string {
	return fmt.Sprintf("%s, shard %d", k.Of(), k.Shard)
}

// Wanted is a cursor to take if it is over these topics.
type Wanted struct {
	Key
	// Patterns are those of its topics, nil for one topic.
	Patterns []string
}

// Held is a cursor that was taken.
type Held struct {
	Key   Key
	Epoch int64
	State window.State
	// Life is the life of the server that the state was read in.
	Life window.Life
	// Before is who held it, "" if nobody did: a holder that has died, or the
	// caller itself, which may not know of it.
	Before string
	// Patterns are those of its topics, nil for one topic.
	Patterns []string
	// Shards is how many cursors the topic is divided among; they are numbered
	// from Base on.
	Shards, Base int
	// Until, if not nil, is where the cursor ends.
	Until *window.Until
	// Err says why the stored position cannot be used; the cursor is held all
	// the same, so that nobody else trips over it at once.
	Err error
}

// Write is one position to store.
type Write struct {
	Key   Key
	Epoch int64
	State window.State
	// Life is the life of the server that the state belongs to; in another one
	// it is not stored.
	Life    window.Life
	Release bool
	// Patterns are those of the cursor's topics, nil for one topic. Finish alone
	// asks for them.
	Patterns []string
}

// Querier runs one query.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// DB is what the statements run on; each is a transaction of its own.
type DB interface {
	Querier
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Store runs the statements for one schema on behalf of one process. It is safe
// for concurrent use.
type Store struct {
	holder                                          string
	ensure, claim, save, beat, leave, boot, sweep   string
	look, join, bury, reshard, exists, lock, change string
	settle, buried                                  string
	finishOne, finishMany                           string
}

// NewStore returns the store of the process that calls itself holder, a name
// that no other process may have.
func NewStore(schemaName, holder string) *Store {
	read := func(file string) string {
		content, err := queries.ReadFile("queries/" + file + ".sql")
		if err != nil {
			panic(err) // embedded: cannot be missing
		}
		return string(content)
	}
	text := func(file string) string { return schema.Text(schemaName, read(file)) }
	filled := func(file string, many bool) string {
		return schema.Text(schemaName, window.Fill(read(file), many, time.Time{}))
	}
	return &Store{
		holder: holder, ensure: text("ensure"), claim: text("claim"), save: text("save"),
		beat: text("beat"), leave: text("leave"), boot: text("boot"), sweep: text("sweep"),
		look: text("look"), join: text("join"), bury: text("bury"), reshard: text("reshard"), exists: text("exists"),
		lock: text("lock"), change: text("switch"), settle: text("settle"), buried: text("buried"),
		finishOne: filled("finish", false), finishMany: filled("finish", true),
	}
}

// OtherTopicsError says that a group's cursor of many topics is over others than
// those that were asked for. Both are patterns of LIKE, sorted.
type OtherTopicsError struct {
	Group         string
	Stored, Asked []string
}

func (e *OtherTopicsError) Error() string {
	return fmt.Sprintf("group %q has a cursor over other topics: %q, not %q", e.Group, e.Stored, e.Asked)
}

// CheckTopics returns an *OtherTopicsError if a cursor is over other topics than
// those that are asked for: its position says nothing of them. Both are patterns
// as window.Topics.Like returns them. What takes a cursor compares them in its
// statement as well.
func CheckTopics(group string, stored, asked []string) error {
	if slices.Equal(stored, asked) {
		return nil
	}
	return &OtherTopicsError{Group: group, Stored: stored, Asked: asked}
}

// Ensure makes a topic's cursors unless it has some, so many, at the latest or
// else the earliest position. Where the topic is "" they are over those that
// match one of the patterns, sorted, or an *OtherTopicsError says that they are
// over others. It returns how many there are, or will be when a change is
// through; 0 if somebody else made them at the same time.
func (s *Store) Ensure(ctx context.Context, db DB, topic Topic, patterns []string, shards int, latest bool) (int, error) {
	for {
		stored, found, err := s.ensureOnce(ctx, db, topic, patterns, shards, latest)
		switch {
		case err != nil:
			return 0, fmt.Errorf("create cursors of %s: %w", topic, err)
		case patterns == nil:
			return stored, nil
		case stored > 0:
			return stored, CheckTopics(topic.Group, found, patterns)
		}
		// Somebody else made them at the same time, who may have asked for others.
	}
}

func (s *Store) ensureOnce(ctx context.Context, db DB, topic Topic, patterns []string, shards int, latest bool) (stored int, found []string, err error) {
	rows, err := db.Query(ctx, s.ensure, topic.Group, topic.Topic, shards, latest, patterns)
	if err != nil {
		return 0, nil, err
	}
	_, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, row.Scan(&stored, &found)
	})
	return stored, found, err
}

// Claim takes those of the wanted cursors that are free, or held by a process
// whose beat still is the one given as dead. One that is over other topics than
// are wanted is not taken.
func (s *Store) Claim(ctx context.Context, db DB, wanted []Wanted, dead map[string]int64) ([]Held, error) {
	keys, patterns := make([]Key, len(wanted)), make([]*string, len(wanted))
	for i, w := range wanted {
		keys[i] = w.Key
		if w.Patterns == nil {
			continue
		}
		// Arrays of arrays are none in SQL: their pieces would be one long list.
		list, err := json.Marshal(w.Patterns)
		if err != nil {
			return nil, fmt.Errorf("encode the topics of %s: %w", w.Key, err)
		}
		text := string(list)
		patterns[i] = &text
	}
	groups, topics, shards := columns(keys)
	var holders []string
	var beats []int64
	for holder, beat := range dead {
		holders, beats = append(holders, holder), append(beats, beat)
	}
	rows, err := db.Query(ctx, s.claim, s.holder, groups, topics, shards, holders, beats, patterns)
	if err != nil {
		return nil, fmt.Errorf("claim cursors: %w", err)
	}
	held, err := pgx.CollectRows(rows, scanHeld)
	if err != nil {
		return nil, fmt.Errorf("claim cursors: %w", err)
	}
	return held, nil
}

// MarkLife marks this life of the server, unless somebody has.
func (s *Store) MarkLife(ctx context.Context, db DB) error {
	if _, err := db.Exec(ctx, s.boot); err != nil {
		return fmt.Errorf("mark the life of the server: %w", err)
	}
	return nil
}

// Holding is what the table says the process holds, and in which life.
type Holding struct {
	Life   window.Life
	Epochs map[Key]int64
	// Reshard are those of which another number of shards was asked for.
	Reshard map[Key]bool
	// Patterns are those of the topics that cursors over many are over.
	Patterns map[Key][]string
}

// Beat renews the process's row and returns what the process holds.
func (s *Store) Beat(ctx context.Context, db Querier, host string, pid int) (Holding, error) {
	rows, err := db.Query(ctx, s.beat, s.holder, host, pid)
	if err != nil {
		return Holding{}, fmt.Errorf("renew lease: %w", err)
	}
	holding := Holding{Epochs: map[Key]int64{}, Reshard: map[Key]bool{}, Patterns: map[Key][]string{}}
	var boot, group, topic *string
	var shard *int
	var epoch *int64
	var reshard *bool
	var patterns []string
	if _, err := pgx.ForEachRow(rows, []any{&holding.Life.Era, &boot, &group, &topic, &shard, &epoch, &reshard, &patterns}, func() error {
		if boot != nil {
			holding.Life.Boot = *boot
		}
		if group != nil {
			key := Key{Group: *group, Topic: *topic, Shard: *shard}
			holding.Epochs[key] = *epoch
			if *reshard {
				holding.Reshard[key] = true
			}
			if patterns != nil {
				holding.Patterns[key] = patterns
			}
		}
		return nil
	}); err != nil {
		return Holding{}, fmt.Errorf("renew lease: %w", err)
	}
	return holding, nil
}

// Sweep gives up whatever the process holds in the table besides the cursors to
// keep.
func (s *Store) Sweep(ctx context.Context, db DB, keep []Key) error {
	groups, topics, shards := columns(keep)
	if _, err := db.Exec(ctx, s.sweep, s.holder, groups, topics, shards); err != nil {
		return fmt.Errorf("give up cursors: %w", err)
	}
	return nil
}

// Save stores positions in one statement and returns the keys of those that
// were still held under their epoch. The others are lost to another process.
func (s *Store) Save(ctx context.Context, db DB, writes []Write) (map[Key]bool, error) {
	args, err := s.writeArgs(writes)
	if err != nil {
		return nil, err
	}
	rows, err := db.Query(ctx, s.save, args...)
	if err != nil {
		return nil, fmt.Errorf("store positions: %w", err)
	}
	saved := make(map[Key]bool, len(writes))
	var key Key
	if _, err := pgx.ForEachRow(rows, []any{&key.Group, &key.Topic, &key.Shard}, func() error {
		saved[key] = true
		return nil
	}); err != nil {
		return nil, fmt.Errorf("store positions: %w", err)
	}
	return saved, nil
}

// writeArgs returns the arguments of save.sql, with which those of settle.sql
// begin.
func (s *Store) writeArgs(writes []Write) ([]any, error) {
	var (
		groups, topics, ps, steps, holes, pasts, aheads []string
		cs                                              []*string
		shards, reaches                                 []int
		epochs, eras, floors, tops, ats, atEras         []int64
		releases                                        []bool
		lifeEras                                        []int64
		lives                                           []string
	)
	for _, w := range writes {
		p := w.State.Position
		hole, err := json.Marshal(w.State.Holes)
		if err != nil {
			return nil, fmt.Errorf("encode holes of %s: %w", w.Key, err)
		}
		if w.State.Holes == nil {
			hole = []byte("[]")
		}
		past, err := json.Marshal(encodePast(p.Past))
		if err != nil {
			return nil, fmt.Errorf("encode eras of %s: %w", w.Key, err)
		}
		ahead, err := json.Marshal(encodeAhead(p.Ahead))
		if err != nil {
			return nil, fmt.Errorf("encode rows ahead of %s: %w", w.Key, err)
		}
		aheads = append(aheads, string(ahead))
		var c *string
		if !p.C.Empty() {
			text := p.C.String()
			c = &text
		}
		groups, topics, shards = append(groups, w.Key.Group), append(topics, w.Key.Topic), append(shards, w.Key.Shard)
		epochs, eras, ps, floors = append(epochs, w.Epoch), append(eras, p.Era), append(ps, p.P.String()), append(floors, p.Floor)
		steps, cs, tops = append(steps, string(p.Step)), append(cs, c), append(tops, p.Top)
		ats, atEras = append(ats, p.At), append(atEras, p.AtEra)
		holes, pasts, releases = append(holes, string(hole)), append(pasts, string(past)), append(releases, w.Release)
		lifeEras, lives = append(lifeEras, w.Life.Era), append(lives, w.Life.Boot)
		reaches = append(reaches, w.State.Reach)
	}
	return []any{
		s.holder, groups, topics, shards, epochs, eras, ps, floors, steps, cs, tops, ats, atEras, holes, pasts, releases,
		lifeEras, lives, aheads, reaches,
	}, nil
}

// Verdict is what becomes of a row that is not acked.
type Verdict struct {
	// Topic is the row's.
	Topic    string
	Era, ID  int64
	Attempts int
	// Metadata replaces the row's, unless nil.
	Metadata []byte
	// Dead says that it becomes a dead letter, with this Error. Otherwise it is
	// deferred until Due, or if that is zero for After, by the server's clock.
	Dead  bool
	Error string
	Due   time.Time
	After time.Duration
}

// Settle stores a verdict and a position in one statement, both if the cursor is
// still held under its epoch and otherwise neither; it reports which. With
// repeated, the same was sent before and its outcome is unknown; nothing may have
// been stored for the cursor since.
func (s *Store) Settle(ctx context.Context, db DB, write Write, verdict Verdict, repeated bool) (bool, error) {
	args, err := s.writeArgs([]Write{write})
	if err != nil {
		return false, err
	}
	var changed *string
	if verdict.Metadata != nil {
		text := string(verdict.Metadata)
		changed = &text
	}
	var due *time.Time
	if !verdict.Due.IsZero() {
		due = &verdict.Due
	}
	args = append(args, verdict.Era, verdict.ID, verdict.Attempts, changed, verdict.Dead, storable(verdict.Error), due, verdict.After.Microseconds(), repeated, verdict.Topic)
	rows, err := db.Query(ctx, s.settle, args...)
	if err != nil {
		return false, fmt.Errorf("store what becomes of row %d: %w", verdict.ID, err)
	}
	saved, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
	if err != nil {
		return false, fmt.Errorf("store what becomes of row %d: %w", verdict.ID, err)
	}
	return saved, nil
}

// maxErrorBytes bounds what is stored of an error.
const maxErrorBytes = 16 << 10

// storable returns the text of an error as PostgreSQL can store it, and not too
// long.
func storable(text string) string {
	text = metadata.Storable(text)
	if len(text) > maxErrorBytes {
		text = strings.ToValidUTF8(text[:maxErrorBytes], "") + " …"
	}
	return text
}

// Buried reports whether a row is among the dead letters of a group.
func (s *Store) Buried(ctx context.Context, db DB, group string, era, id int64) (bool, error) {
	rows, err := db.Query(ctx, s.buried, group, era, id)
	if err != nil {
		return false, fmt.Errorf("look among the dead letters: %w", err)
	}
	buried, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
	if err != nil {
		return false, fmt.Errorf("look among the dead letters: %w", err)
	}
	return buried, nil
}

// Leave gives up everything the process holds and removes its row.
func (s *Store) Leave(ctx context.Context, db DB) error {
	if _, err := db.Exec(ctx, s.leave, s.holder); err != nil {
		return fmt.Errorf("give up lease: %w", err)
	}
	return nil
}

func columns(keys []Key) (groups, topics []string, shards []int) {
	for _, key := range keys {
		groups, topics, shards = append(groups, key.Group), append(topics, key.Topic), append(shards, key.Shard)
	}
	return groups, topics, shards
}

// scanHeld reads a claimed row. What cannot be a position is an error of that
// cursor alone.
func scanHeld(row pgx.CollectableRow) (Held, error) {
	var h Held
	var p, holes, past, ahead, current string
	var c, boot, until *string
	var end window.Until
	pos := &h.State.Position
	err := row.Scan(&h.Key.Group, &h.Key.Topic, &h.Key.Shard, &h.Epoch, &pos.Era, &p, &pos.Floor, &pos.Step, &c, &pos.Top, &pos.At, &pos.AtEra, &holes, &past, &ahead,
		&h.State.Reach, &h.Before, &h.Life.Era, &boot, &current, &h.Shards, &h.Base, &until, &end.Top, &end.Era, &h.Patterns)
	if err != nil {
		return Held{}, err
	}
	if boot != nil {
		h.Life.Boot = *boot
	}
	now, err := window.ParseSnapshot(current)
	if err != nil {
		return Held{}, err
	}
	if until != nil {
		if end.C, err = window.ParseSnapshot(*until); err != nil {
			return Held{}, err
		}
		h.Until = &end
	}
	h.Err = decodeState(&h.State, p, c, holes, past, ahead)
	if h.Err == nil {
		h.Err = checkFuture(h.State.Position, h.Life, now)
	}
	if h.Err == nil && h.Until != nil {
		h.Err = checkUntil(end, h.Life, now)
	}
	if h.Err != nil {
		h.Err = fmt.Errorf("%w: %s: %w", ErrBadCursor, h.Key, h.Err)
	}
	return h, nil
}

// checkFuture reports a position that claims to have been handed out what has
// not happened yet: its messages would be passed over in silence.
func checkFuture(pos window.Position, life window.Life, now window.Snapshot) error {
	if pos.Era != life.Era {
		return nil
	}
	for name, snapshot := range map[string]window.Snapshot{"p": pos.P, "c": pos.C} {
		if snapshot.Xmax() > now.Xmax() {
			return fmt.Errorf("column %s is the snapshot %q, from the future of this server (%q)", name, snapshot, now)
		}
	}
	return nil
}

func decodeState(state *window.State, p string, c *string, holes, past, ahead string) (err error) {
	pos := &state.Position
	if pos.P, err = window.ParseSnapshot(p); err != nil {
		return fmt.Errorf("column p: %w", err)
	}
	if c != nil {
		if pos.C, err = window.ParseSnapshot(*c); err != nil {
			return fmt.Errorf("column c: %w", err)
		}
	}
	if err := json.Unmarshal([]byte(holes), &state.Holes); err != nil {
		return fmt.Errorf("column holes: %w", err)
	}
	var stored map[string]pastEra
	if err := json.Unmarshal([]byte(past), &stored); err != nil {
		return fmt.Errorf("column past: %w", err)
	}
	if pos.Past, err = decodePast(stored); err != nil {
		return fmt.Errorf("column past: %w", err)
	}
	var rows [][2]uint64
	if err := json.Unmarshal([]byte(ahead), &rows); err != nil {
		return fmt.Errorf("column ahead: %w", err)
	}
	pos.Ahead = decodeAhead(rows)
	return pos.Validate()
}

// encodeAhead returns the rows as pairs of id and transaction.
func encodeAhead(ahead []window.Ahead) [][2]uint64 {
	rows := make([][2]uint64, len(ahead))
	for i, a := range ahead {
		rows[i] = [2]uint64{uint64(a.ID), a.XID} //nolint:gosec // ids are positive
	}
	return rows
}

func decodeAhead(rows [][2]uint64) []window.Ahead {
	var ahead []window.Ahead
	for _, row := range rows {
		ahead = append(ahead, window.Ahead{ID: int64(row[0]), XID: row[1]}) //nolint:gosec // Validate refuses what has wrapped
	}
	return ahead
}

// pastEra is window.PastEra as it is stored.
type pastEra struct {
	P     string `json:"p"`
	Floor int64  `json:"floor,omitempty"`
	C     string `json:"c,omitempty"`
	At    int64  `json:"at,omitempty"`
	// Ahead holds pairs of id and transaction.
	Ahead [][2]uint64 `json:"ahead,omitempty"`
}

func encodePast(past map[int64]window.PastEra) map[string]pastEra {
	stored := make(map[string]pastEra, len(past))
	for era, known := range past {
		e := pastEra{P: known.P.String(), Floor: known.Floor, At: known.At, Ahead: encodeAhead(known.Ahead)}
		if !known.C.Empty() {
			e.C = known.C.String()
		}
		stored[strconv.FormatInt(era, 10)] = e
	}
	return stored
}

func decodePast(stored map[string]pastEra) (map[int64]window.PastEra, error) {
	past := make(map[int64]window.PastEra, len(stored))
	for text, e := range stored {
		era, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("era %.50q is not a number", text)
		}
		known := window.PastEra{Floor: e.Floor, At: e.At, Ahead: decodeAhead(e.Ahead)}
		if known.P, err = window.ParseSnapshot(e.P); err != nil {
			return nil, err
		}
		if e.C != "" {
			if known.C, err = window.ParseSnapshot(e.C); err != nil {
				return nil, err
			}
		}
		past[era] = known
	}
	return past, nil
}
