package window

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/millrace/watermill-outbox/schema"
)

//go:embed queries/*.sql
var queries embed.FS

// Queries are the statements for one schema. Safe for concurrent use.
type Queries struct {
	name       string
	now, seals string

	mu sync.Mutex
	// reading are those that read messages.
	reading map[reads]statements
}

// reads says what statements read: one topic or many, and nothing that is older than
// since, unless that is zero.
type reads struct {
	many  bool
	since time.Time
}

// statements are those that read messages.
type statements struct {
	open, late, lateXids, main, past, holes string
}

// NewQueries returns the statements for the schema called name.
func NewQueries(name string) *Queries {
	q := &Queries{name: name, reading: map[reads]statements{}}
	// The seals are read with what the statements that leave something out say.
	q.now, q.seals = q.text("now", reads{}), q.text("seals", reads{since: time.Unix(0, 0)})
	return q
}

func (q *Queries) text(file string, what reads) string {
	content, err := queries.ReadFile("queries/" + file + ".sql")
	if err != nil {
		panic(err) // embedded: cannot be missing
	}
	return schema.Text(q.name, Fill(string(content), what.many, what.since))
}

// maxReading is how many statements are kept: a few at a time as a rule, more while
// groups are hours apart.
const maxReading = 64

// statements returns those that read this. The moment is in their text, so that the
// server plans them once for each, without the partitions that are left out; if it
// were a parameter, it would have to lock all of them at each look.
func (q *Queries) statements(what reads) statements {
	q.mu.Lock()
	defer q.mu.Unlock()
	known, ok := q.reading[what]
	if !ok {
		if len(q.reading) >= maxReading {
			clear(q.reading)
		}
		known = statements{
			open: q.text("open", what), late: q.text("late", what), lateXids: q.text("late_xids", what),
			main: q.text("main", what), past: q.text("past", what), holes: q.text("holes", what),
		}
		q.reading[what] = known
	}
	return known
}

// The statements are written once, with places for what depends on whether they
// read one topic or many: from what (:messages), which rows of it (:chosen), and
// what they say of each row's topic (:topic). Where a statement counts the rows that
// it looks at, :chosen is in two parts: what the index has (:range), and what has
// to be looked at (:rest).
const (
	messagesOfOne = "outbox.messages"
	// Of many topics rows are found by the indexes messages_id and messages_xid,
	// of these expressions. They are expressions so that the planner cannot take
	// these indexes for one topic: where its statistics call a topic frequent that
	// no longer is, it would walk the rows of all others.
	messagesOfMany = `(
            SELECT e.id + 0 AS id, nullif(e.xid, '0'::xid8) AS xid, e.era + 0 AS era, e.topic, e.key, e.uuid, e.metadata, e.payload,
                   e.created_at, e.target_group, e.attempt
            FROM outbox.messages e
        )`
)

// spareText stands for :spare where something is left out.
const spareText = "(SELECT CASE WHEN EXISTS (SELECT FROM outbox.messages_default) THEN -1 ELSE coalesce((SELECT u.voids FROM outbox.upkeep u), -1) END)"

// Fill puts into the text of a statement what reads one topic, or many, and nothing
// that is older than since unless that is zero. What leaves out something says
// besides whether it may (:spare, see Bound): how many times seals were void, -1 while
// there is anything in the DEFAULT partition.
func Fill(text string, many bool, since time.Time) string {
	recent, spare := "", "NULL::bigint"
	if !since.IsZero() {
		recent = " AND m.created_at >= '" + since.UTC().Format("2006-01-02 15:04:05.999999") + "+00'::timestamptz"
		spare = spareText
	}
	messages, topic, chosen := messagesOfOne, "NULL::text", "m.topic = $1::text"
	inIndex, rest := chosen, "true"
	if many {
		messages, topic, chosen = messagesOfMany, "m.topic", "m.topic LIKE ANY ($1::text[])"
		inIndex, rest = "true", chosen
	}
	return strings.NewReplacer(":messages", messages, ":topic", topic, ":chosen", chosen+recent, ":range", inIndex+recent, ":rest", rest,
		":recent", recent, ":spare", spare).Replace(text)
}

// ErrWentBack says that the server has not done yet what the position says was
// handed out: its data folder was replaced by an older copy. The position in
// memory means nothing, the one in the cursor is as old as the server.
var ErrWentBack = errors.New("the server is older than the position")

// ErrOtherLife says that a statement was answered in another life than the one
// before, or by another server: connections lead to different ones, or did.
var ErrOtherLife = errors.New("the server began another life (a crash, a failover), or is another one")

// Querier runs one query, each in a transaction of its own.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Life names one life of one server, see the package documentation.
type Life struct {
	// Era is the system identifier of the cluster.
	Era int64
	// Boot is the random row put there in this life; "" if nobody has yet.
	Boot string
}

// Page is what one statement returned.
type Page struct {
	Rows []Row
	// Life is the life of the server that the page was read in.
	Life Life
	// End is the position when all rows have been handed out.
	End Position
	// More says that the next page is worth reading at once: this one was full,
	// or the step changed.
	More bool
	// Holes says that the rows are those of holes; the position does not move.
	Holes bool
	// Gone are holes whose row no longer exists.
	Gone []Hole

	start Position
	// ahead, for rows that came from the write-ahead log, is start.Ahead and
	// then these rows.
	ahead []Ahead
}

// After returns the position when the rows up to and including i have been
// handed out.
func (p Page) After(i int) Position {
	if i == len(p.Rows)-1 {
		return p.End
	}
	row := p.Rows[i]
	pos := p.start
	if p.ahead != nil {
		n := len(pos.Ahead) + i + 1
		pos.Ahead = p.ahead[:n:n]
		return pos
	}
	pos.Step, pos.At, pos.AtEra = row.step, row.ID, 0
	if row.step == Past {
		pos.AtEra = row.Era
	}
	return pos
}

// Window returns the snapshot up to which the page's window goes, C, or the
// empty one for a page that belongs to no window.
func (p Page) Window() Snapshot {
	if p.ahead != nil || p.Holes {
		return Snapshot{}
	}
	return p.start.C
}

// LivePage returns the page of rows that came from the write-ahead log, in the
// order in which their transactions committed. It follows on pos, which is
// between two windows. With a sample, everything that the sample sees has been
// handed out when these rows have: it becomes P, unless P sees more already.
func LivePage(pos Position, life Life, rows []Row, sample Snapshot) Page {
	page := Page{Rows: rows, Life: life, start: pos, End: pos}
	page.ahead = make([]Ahead, len(pos.Ahead), len(pos.Ahead)+len(rows)+1)
	copy(page.ahead, pos.Ahead)
	for _, row := range rows {
		page.ahead = append(page.ahead, Ahead{ID: row.ID, XID: row.XID})
		page.End.Floor = max(page.End.Floor, row.ID)
	}
	page.End.Ahead = page.ahead[:len(page.ahead):len(page.ahead)]
	if !sample.Empty() && sample.Covers(pos.P) {
		page.End.P = sample
		page.End.Ahead = unseen(page.ahead, sample)
	}
	return page
}

// Limits bound a page. A page holds at least one row and may pass Bytes by the
// size of its last row.
type Limits struct {
	Rows  int
	Bytes int
}

// Reader reads topics for a consumer group. It holds no state between calls
// and is safe for concurrent use.
type Reader struct {
	Queries *Queries
	Topics  Topics
	Group   string
	Limits  Limits
	// Shard is the one to read, of so many; of 0 or 1 it is all there is.
	Shard, Shards int
	// Until, if not nil, is where the position ends: nothing behind it is read.
	Until *Until
	// Seals, if not nil, let it leave out partitions that the position has all of.
	Seals *Seals
	// Scan is how many ids one statement looks at that reads many topics, of which
	// few may match; 0 stands for the default. The ids of one topic need no bound:
	// they match. Late rows have none: the rows of a transaction that committed
	// late are looked at until a page is full, all of them where few match.
	Scan int64
}

// shards is how many there are.
func (r Reader) shards() int { return max(r.Shards, 1) }

// statements returns those for the topics, and what stands for the topics in them.
// They leave out what is older than since, unless that is zero.
func (r Reader) statements(since time.Time) (statements, any) {
	if name, one := r.Topics.Single(); one {
		return r.Queries.statements(reads{since: since}), name
	}
	return r.Queries.statements(reads{many: true, since: since}), r.Topics.Like()
}

// defaultScan takes some tens of milliseconds when nothing matches.
const defaultScan = 50_000

// scanTo returns up to which id the page looks that begins behind the given one.
func (r Reader) scanTo(after int64) int64 {
	if _, one := r.Topics.Single(); one {
		return math.MaxInt64
	}
	return after + cmp.Or(r.Scan, defaultScan)
}

// Next reads the page that follows on pos, with one statement (two after a
// restart among late rows). Beyond the end it reads none: see Until.Reached.
func (r Reader) Next(ctx context.Context, db Querier, pos Position) (Page, error) {
	switch pos.Step {
	case Past:
		return r.past(ctx, db, pos)
	case Idle:
		if r.Until != nil {
			return r.toEnd(ctx, db, pos)
		}
		return r.open(ctx, db, pos)
	case Late:
		return r.late(ctx, db, pos)
	case Main:
		return r.main(ctx, db, pos)
	}
	return Page{}, fmt.Errorf("position has no step %q", pos.Step)
}

// toEnd begins the last window, between two windows of a position that ends.
func (r Reader) toEnd(ctx context.Context, db Querier, pos Position) (Page, error) {
	if pos.Era == r.Until.Era && !r.Until.Reached(pos) {
		return r.late(ctx, db, r.Until.towards(pos))
	}
	// There is nothing to read, unless the server is of another era by now.
	now, err := r.Queries.Now(ctx, db)
	if err != nil {
		return Page{}, err
	}
	if now.Life.Era != pos.Era {
		return Page{Life: now.Life, End: pos.enterEra(now.Life.Era), More: true}, nil
	}
	return Page{Life: now.Life, start: pos, End: pos}, nil
}

func (r Reader) open(ctx context.Context, db Querier, pos Position) (Page, error) {
	end := r.scanTo(pos.Floor)
	head, page, err := r.readRecent(ctx, db, pos, openPage, func(s statements) string { return s.open }, r.Group, pos.P.String(), pos.Floor, r.Limits.Rows, r.Limits.Bytes, r.Shard, r.shards(), end)
	if err != nil || page.Life.Era != pos.Era {
		return page, err
	}
	c, err := ParseSnapshot(head.snapshot)
	if err != nil {
		return Page{}, err
	}
	if !c.Covers(pos.P) {
		return Page{}, fmt.Errorf("%w: position %q, server %q", ErrWentBack, pos.P, c)
	}
	if lost := unseen(pos.Ahead, c); len(lost) > 0 {
		return Page{}, fmt.Errorf("%w: transaction %d was handed out, server %q", ErrWentBack, lost[0].XID, c)
	}
	window := pos
	window.C, window.Top, window.At, window.lateXids = c, head.top, 0, head.lateXids
	page.start = window
	switch full, last := head.full(r.Limits); {
	case full:
		page.End = window
		page.End.Step, page.End.At = last.step, last.ID
		page.More = true
	case end < head.top:
		page.End = window
		page.End.Step, page.End.At = Main, end
		page.More = true
	default:
		page.End = window.done()
	}
	return page, nil
}

func (r Reader) main(ctx context.Context, db Querier, pos Position) (Page, error) {
	after := max(pos.At, pos.Floor)
	end := r.scanTo(after)
	head, page, err := r.readRecent(ctx, db, pos, plainPage, func(s statements) string { return s.main }, r.Group, r.Limits.Rows, r.Limits.Bytes,
		after, min(end, pos.Top), pos.P.String(), pos.C.String(), r.Shard, r.shards())
	if err != nil || page.Life.Era != pos.Era {
		return page, err
	}
	switch full, last := head.full(r.Limits); {
	case full:
		page.End.At = last.ID
		page.More = true
	case end < pos.Top:
		page.End.At = end
		page.More = true
	default:
		page.End = pos.done()
	}
	return page, nil
}

func (r Reader) late(ctx context.Context, db Querier, pos Position) (Page, error) {
	var found Life
	if pos.lateXids == nil {
		life, xids, err := r.findLate(ctx, db, pos)
		if err != nil {
			return Page{}, err
		}
		if life.Era != pos.Era {
			return Page{Life: life, End: pos.enterEra(life.Era), More: true}, nil
		}
		found = life
		pos.lateXids = xids
	}
	head, page, err := r.readRecent(ctx, db, pos, plainPage, func(s statements) string { return s.late }, r.Group, r.Limits.Rows, r.Limits.Bytes, pos.At, pos.Floor, pos.lateXids, r.Shard, r.shards())
	if err != nil || page.Life.Era != pos.Era {
		return page, err
	}
	if found != (Life{}) && found != page.Life {
		// The server changed in between; the caller drops a page of another life.
		return Page{Life: found, End: pos, More: true}, nil
	}
	page.More = true
	if full, last := head.full(r.Limits); full {
		page.End.At = last.ID
	} else {
		page.End.Step, page.End.At = Main, 0
	}
	return page, nil
}

// findLate returns the transactions with late rows in an open window, and the
// life they were read in.
func (r Reader) findLate(ctx context.Context, db Querier, pos Position) (life Life, xids []string, err error) {
	sql, topics := r.statements(time.Time{})
	rows, err := db.Query(ctx, sql.lateXids, topics, pos.P.String(), pos.C.String(), pos.Floor)
	if err != nil {
		return Life{}, nil, err
	}
	var boot *string
	xids, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (xids []string, err error) {
		err = row.Scan(&life.Era, &boot, &xids)
		return xids, err
	})
	if boot != nil {
		life.Boot = *boot
	}
	return life, xids, err
}

// pastScan is how many rows of other eras one statement looks at.
const pastScan = 20_000

func (r Reader) past(ctx context.Context, db Querier, pos Position) (Page, error) {
	var eras, ats []int64
	var ps, cs []string
	for era, known := range pos.Past {
		eras, ps, cs, ats = append(eras, era), append(ps, known.P.String()), append(cs, known.C.String()), append(ats, known.At)
	}
	var endEra *int64
	end := Snapshot{}
	if r.Until != nil {
		endEra, end = &r.Until.Era, r.Until.C
	}
	after := pos.AtEra
	if pos.At == 0 {
		after = -1 << 63
	}
	scan := int64(pastScan)
	if _, one := r.Topics.Single(); !one {
		scan = cmp.Or(r.Scan, scan)
	}
	sql, topics := r.statements(time.Time{})
	head, page, err := r.read(ctx, db, pos, pastPage, sql.past, topics, r.Group, r.Limits.Rows, r.Limits.Bytes, after, pos.At, eras, ps, cs, ats, scan, r.Shard, r.shards(), endEra, end.String())
	if err != nil || page.Life.Era != pos.Era {
		return page, err
	}
	page.More = true
	page.start.Past = named(pos.Past, page.Rows)
	page.End.Past = page.start.Past
	switch full, last := head.full(r.Limits); {
	case full:
		page.End.At, page.End.AtEra = last.ID, last.Era
	case head.scanned >= scan:
		page.End.At, page.End.AtEra = head.scannedID, head.scannedEra
	default:
		page.End.Step, page.End.At, page.End.AtEra = Idle, 0, 0
		page.End.Past = finished(page.End.Past)
	}
	return page, nil
}

// Holes reads the rows of the first of the given holes, sorted by era and id, as
// many as a page holds, and returns the holes that remain to be read.
func (r Reader) Holes(ctx context.Context, db Querier, holes []Hole) (page Page, rest []Hole, err error) {
	asked := holes[:min(len(holes), r.Limits.Rows)]
	eras := make([]int64, len(asked))
	ids := make([]int64, len(asked))
	for i, hole := range asked {
		eras[i], ids[i] = hole.Era, hole.ID
	}
	sql, topics := r.statements(time.Time{})
	head, page, err := r.read(ctx, db, Position{}, plainPage, sql.holes, topics, r.Group, r.Limits.Rows, r.Limits.Bytes, eras, ids)
	if err != nil {
		return Page{}, nil, err
	}
	page.Holes = true
	answered := len(asked)
	if full, last := head.full(r.Limits); full {
		// Cut by bytes perhaps: what follows the last row was not answered.
		answered = 1 + slices.IndexFunc(asked, func(h Hole) bool { return h.Era == last.Era && h.ID == last.ID })
	}
	for _, hole := range asked[:answered] {
		if !slices.ContainsFunc(page.Rows, func(row Row) bool { return row.Era == hole.Era && row.ID == hole.ID }) {
			page.Gone = append(page.Gone, hole)
		}
	}
	return page, holes[answered:], nil
}

// Now is what the database answers about itself.
type Now struct {
	Life     Life
	Snapshot Snapshot
	Top      int64
}

// Now asks for the current snapshot and what goes with it.
func (q *Queries) Now(ctx context.Context, db Querier) (Now, error) {
	rows, err := db.Query(ctx, q.now)
	if err != nil {
		return Now{}, err
	}
	var now Now
	var boot *string
	text, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (text string, err error) {
		err = row.Scan(&now.Life.Era, &boot, &text, &now.Top)
		return text, err
	})
	if err != nil {
		return Now{}, err
	}
	if boot != nil {
		now.Life.Boot = *boot
	}
	now.Snapshot, err = ParseSnapshot(text)
	return now, err
}

// done is the position when the window is through.
func (p Position) done() Position {
	p.P, p.C = p.C, Snapshot{}
	p.Ahead = unseen(p.Ahead, p.P)
	p.Floor = max(p.Floor, p.Top)
	p.Step, p.Top, p.At, p.AtEra, p.lateXids = Idle, 0, 0, 0, nil
	return p
}

// header is what a page's first line says, and its last.
type header struct {
	line
	last  Row
	bytes int64
	// rows counts the page's rows, those included that were handed out before.
	rows int
}

// growth is for how many more rows there is to be room on a page with so many, which
// come one by one: little for the few rows that a look finds as a rule, and soon a whole
// page, of which copies are large.
func (r Reader) growth(rows int) int { return min(max(3*rows, 8), max(r.Limits.Rows-rows, 1)) }

// full reports whether rows may follow on this page, and its last row. A page
// that was cut by bytes is as full as one that was cut by rows.
func (h header) full(limits Limits) (bool, Row) {
	return h.rows > 0 && (h.rows >= limits.Rows || h.bytes >= int64(limits.Bytes)), h.last
}

var steps = map[int]Step{1: Late, 2: Main, 3: Past, 4: Idle}

// readRecent is read for the statements that may leave out what is old. If one was
// not right to, it reads again without leaving anything out. The topics come before
// args.
func (r Reader) readRecent(ctx context.Context, db Querier, pos Position, kind pageKind, of func(statements) string, args ...any) (header, Page, error) {
	bound := r.Seals.Of(pos.Era, pos.P)
	for {
		sql, topics := r.statements(bound.Since)
		head, page, err := r.read(ctx, db, pos, kind, of(sql), append([]any{topics}, args...)...)
		if err != nil || page.Life.Era != pos.Era || bound.Holds(page.Life, head.voids) {
			return head, page, err
		}
		r.Seals.Forget()
		bound = Bound{}
	}
}

// read runs a query that returns a header and rows. If the server belongs to
// another era than pos, the page has no rows and ends in the new era.
func (r Reader) read(ctx context.Context, db Querier, pos Position, kind pageKind, query string, args ...any) (header, Page, error) {
	rows, err := db.Query(ctx, query, args...)
	if err != nil {
		return header{}, Page{}, err
	}
	defer rows.Close()

	var head header
	page := Page{start: pos, End: pos}
	for first := true; rows.Next(); first = false {
		l, err := scan(rows, kind)
		if err != nil {
			return header{}, Page{}, err
		}
		if first != (l.kind == 0) {
			return header{}, Page{}, errors.New("a page's header is not its first row")
		}
		if first {
			head.line = l
			continue
		}
		if l.row.Era == 0 {
			l.row.Era = head.life.Era
		}
		if name, one := r.Topics.Single(); one {
			l.row.Topic = name
		}
		// The statements' plans are in order without a sort at the top, which
		// would hold back the first row until the last is read. A plan that is
		// not would lose rows, so it is an error.
		if len(page.Rows) > 0 && !head.last.before(l.row) {
			return header{}, Page{}, fmt.Errorf("a page is out of order: id %d after %d", l.row.ID, head.last.ID)
		}
		if len(page.Rows) == cap(page.Rows) {
			page.Rows = slices.Grow(page.Rows, r.growth(len(page.Rows)))
		}
		page.Rows = append(page.Rows, l.row)
		head.last, head.bytes = l.row, l.total
	}
	if err := rows.Err(); err != nil {
		return header{}, Page{}, err
	}
	if head.life.Era == 0 {
		return header{}, Page{}, errors.New("a page came without its header")
	}
	page.Life = head.life
	if pos.Step != "" && head.life.Era != pos.Era {
		return head, Page{Life: head.life, End: pos.enterEra(head.life.Era), More: true}, nil
	}
	head.rows = len(page.Rows)
	page.Rows = pos.withoutAhead(page.Rows)
	return head, page, nil
}

// withoutAhead removes the rows that were handed out already.
func (p Position) withoutAhead(rows []Row) []Row {
	known := map[Hole]bool{}
	add := func(era int64, ahead []Ahead) {
		for _, a := range ahead {
			known[Hole{Era: era, ID: a.ID}] = true
		}
	}
	if p.Step == Past {
		for era, past := range p.Past {
			add(era, past.Ahead)
		}
	} else {
		add(p.Era, p.Ahead)
	}
	if len(known) == 0 {
		return rows
	}
	return slices.DeleteFunc(rows, func(row Row) bool { return known[Hole{Era: row.Era, ID: row.ID}] })
}

// before reports whether r comes before other in a page: late rows before main
// rows, then by era, then by id.
func (r Row) before(other Row) bool {
	switch {
	case r.step != other.step:
		return r.step == Late
	case r.Era != other.Era:
		return r.Era < other.Era
	}
	return r.ID < other.ID
}
