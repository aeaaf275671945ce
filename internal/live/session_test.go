package live

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/replication"
)

// fakeServer is what the statements of a source are answered from. Safe for
// concurrent use.
type fakeServer struct {
	mu sync.Mutex
	// era and what follows is the barrier's answer; boot and publication are NULL
	// if they are nil.
	era               int64
	boot, publication any
	timeline          string
	snapshot          string
	insert, flush     string
	// drawn is the last transaction id that was drawn.
	drawn int64
	// xmin, xmax, age and who are those of the running transactions.
	xmin, xmax int64
	age        float64
	who        string
	// pinned is how much WAL the slot keeps, if it is there.
	pinned   int64
	slotless bool
	// asked counts the statements, by the kinds below.
	asked map[string]int
}

// The kinds of statements.
const (
	kindBarrier = "barrier"
	kindDraw    = "draw"
	kindPinned  = "pinned"
	kindOldest  = "oldest"
)

func newFakeServer() *fakeServer {
	return &fakeServer{
		era: 7, boot: "boot", publication: "publication", timeline: "00000001", snapshot: "1000000:1000000:",
		insert: "0/0", flush: "0/0", drawn: 500, xmin: 600, xmax: 600, asked: map[string]int{},
	}
}

// set changes what the server answers.
func (s *fakeServer) set(change func(s *fakeServer)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

func (s *fakeServer) count(kind string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[kind]
}

func (s *fakeServer) answer(kind string) []any {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked[kind]++
	switch kind {
	case kindBarrier:
		return []any{s.era, s.boot, s.snapshot, s.insert, s.flush, s.timeline, s.publication}
	case kindDraw:
		s.drawn++
		return []any{s.drawn}
	case kindPinned:
		if s.slotless {
			return nil
		}
		return []any{s.pinned, s.xmin, s.xmax}
	default:
		return []any{s.xmin, s.xmax, s.age, s.who}
	}
}

// fakeDB is a way to the server. Before a statement is answered, before has its
// say, if there is one.
type fakeDB struct {
	server *fakeServer
	before func(ctx context.Context, kind string) error
}

func (db *fakeDB) Query(ctx context.Context, sql string, _ ...any) (pgx.Rows, error) {
	kind := kindOldest
	switch {
	case strings.Contains(sql, "pg_walfile_name"):
		kind = kindBarrier
	case strings.HasPrefix(sql, "SELECT pg_current_xact_id()"):
		kind = kindDraw
	case strings.Contains(sql, "pg_replication_slots"):
		kind = kindPinned
	}
	if db.before != nil {
		if err := db.before(ctx, kind); err != nil {
			return nil, err
		}
	}
	return &fakeRows{values: db.server.answer(kind)}, nil
}

// never is what a pool does that has no connection to spare.
func never(ctx context.Context, _ string) error {
	<-ctx.Done()
	return ctx.Err()
}

// fakeRows is one row, or none without values.
type fakeRows struct {
	pgx.Rows

	values []any
	read   bool
}

func (r *fakeRows) Close()                        {}
func (r *fakeRows) Err() error                    { return nil }
func (r *fakeRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }
func (r *fakeRows) RawValues() [][]byte           { return make([][]byte, len(r.values)) }

func (r *fakeRows) Next() bool {
	first := !r.read && r.values != nil
	r.read = true
	return first
}

func (r *fakeRows) Scan(dest ...any) error {
	if len(dest) != len(r.values) {
		return fmt.Errorf("%d places for %d values", len(dest), len(r.values))
	}
	for i, value := range r.values {
		into := reflect.ValueOf(dest[i]).Elem()
		switch {
		case value == nil:
			into.SetZero()
		case into.Kind() == reflect.Pointer:
			into.Set(reflect.New(into.Type().Elem()))
			into.Elem().Set(reflect.ValueOf(value))
		default:
			into.Set(reflect.ValueOf(value))
		}
	}
	return nil
}

// rig is a session whose stream is the test.
type rig struct {
	t       *testing.T
	server  *fakeServer
	barrier *fakeDB
	pool    *fakeDB
	source  *Source
	session *session
}

const testBytes = 64 << 10

// newRig returns a session with this bound, the topics of which readers want and
// may attach to.
func newRig(t *testing.T, bytes int, topics ...string) *rig {
	t.Helper()
	server := newFakeServer()
	r := &rig{t: t, server: server, barrier: &fakeDB{server: server}, pool: &fakeDB{server: server}}
	r.source = New(Config{
		Schema: "outbox", Publication: "outbox", Barrier: r.barrier, DB: r.pool,
		Problems: func(context.Context) ([]string, error) { return nil, nil },
		Tick:     100 * time.Millisecond, Lag: 500 * time.Millisecond, Bytes: bytes, MaxPinned: 1000, Timeout: time.Second,
		Failed: func(error) {}, Logger: watermill.NopLogger{},
	})
	r.session = &session{
		source: r.source, slot: "slot", base: identity{life: window.Life{Era: 7, Boot: "boot"}, timeline: "00000001", publication: "publication"},
		begin: 10, began: time.Now(), news: make(chan struct{}, 1), topics: map[string]*topic{}, stream: &replication.Stream{},
	}
	for _, name := range topics {
		r.source.wanted[name] = &wish{topics: window.One(name), readers: 1}
		topic := r.session.add(window.One(name), 0)
		topic.readers, topic.ready = 1, true
	}
	r.source.session = r.session
	return r
}

// visible sets the snapshot that the barrier gets.
func (r *rig) visible(snapshot string) {
	r.server.set(func(s *fakeServer) { s.snapshot = snapshot })
}

// stored is a row as a test writes it.
type stored struct {
	id      int64
	topic   string
	group   string
	payload int // bytes
	era     int64
	xid     uint64 // that of its transaction if 0
}

func (r *rig) receive(event replication.Event) {
	r.t.Helper()
	require.NoError(r.t, r.session.receive(event))
}

func (r *rig) begin(xid uint32) { r.t.Helper(); r.receive(&replication.Begin{XID: xid}) }

func (r *rig) insert(xid uint32, rows ...stored) {
	r.t.Helper()
	for _, row := range rows {
		r.receive(insertOf(xid, row))
	}
}

func (r *rig) commit(end replication.LSN) {
	r.t.Helper()
	r.receive(&replication.Commit{CommitLSN: end, EndLSN: end})
}

// transaction is one that has come in as a whole.
func (r *rig) transaction(xid uint32, rows ...stored) {
	r.t.Helper()
	r.begin(xid)
	r.insert(xid, rows...)
	r.commit(0)
}

// step is one turn of the dispatcher.
func (r *rig) step() {
	r.t.Helper()
	require.NoError(r.t, r.session.step(r.t.Context(), false))
}

// attach returns the buffer of a reader that had nothing from the table.
func (r *rig) attach(topic, group string) *Buffer {
	r.t.Helper()
	buffer := r.session.attach(topic, group, Shard{})
	require.NotNil(r.t, buffer)
	return buffer
}

// takeAll takes all that is in a buffer.
func takeAll(b *Buffer) (ids []int64, samples []window.Snapshot) {
	for {
		rows, sample, found, _ := b.take(window.Limits{Rows: 1 << 20, Bytes: 1 << 30})
		for _, row := range rows {
			ids = append(ids, row.ID)
		}
		if !sample.Empty() {
			samples = append(samples, sample)
		}
		if !found && sample.Empty() {
			return ids, samples
		}
	}
}

func isGone(b *Buffer) bool {
	select {
	case <-b.Gone():
		return true
	default:
		return false
	}
}

func snapshot(t testing.TB, text string) window.Snapshot {
	t.Helper()
	s, err := window.ParseSnapshot(text)
	require.NoError(t, err)
	return s
}

func binaryValue(data []byte) replication.Value {
	return replication.Value{Kind: replication.Binary, Data: data}
}

func textValue(data string) replication.Value {
	return replication.Value{Kind: replication.Text, Data: []byte(data)}
}

func bigint(n int64) replication.Value {
	return binaryValue(binary.BigEndian.AppendUint64(nil, uint64(n)))
}

func integer32(n int32) replication.Value {
	return binaryValue(binary.BigEndian.AppendUint32(nil, uint32(n)))
}

var nullValue = replication.Value{Kind: replication.Null}

// logRelation describes the log as the stream does.
var logRelation = func() *replication.Relation {
	r := &replication.Relation{OID: 1, Schema: "outbox", Name: "messages"}
	for _, name := range columnNames {
		r.Columns = append(r.Columns, replication.Column{Name: name})
	}
	return r
}()

// insertOf is what the stream says of a row; its LSN is its id.
func insertOf(xid uint32, row stored) *replication.Insert {
	if row.era == 0 {
		row.era = 7
	}
	if row.xid == 0 {
		row.xid = uint64(xid)
	}
	group := nullValue
	if row.group != "" {
		group = binaryValue([]byte(row.group))
	}
	return &replication.Insert{LSN: replication.LSN(row.id), Relation: logRelation, New: replication.Tuple{
		columnID: bigint(row.id), columnXID: bigint(int64(row.xid)), columnEra: bigint(row.era),
		columnTopic: binaryValue([]byte(row.topic)), columnKey: nullValue, columnUUID: binaryValue([]byte("uuid")),
		columnMetadata: binaryValue([]byte("{}")), columnPayload: binaryValue(make([]byte, row.payload)),
		columnCreatedAt: bigint(0), columnTargetGroup: group, columnAttempt: integer32(1),
	}}
}

// A commit can be decoded before others see it. Such a transaction is held, and
// only that one; when it is seen it goes out.
func TestOnlyWhatTheBarrierSeesGoesOut(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	buffer := r.attach("topic", "group")
	r.transaction(1001, stored{id: 1, topic: "topic"})
	r.transaction(1002, stored{id: 2, topic: "topic"}, stored{id: 3, topic: "topic"})
	r.transaction(1003, stored{id: 4, topic: "topic"})
	r.visible("1001:1003:1001")
	r.step()
	ids, _ := takeAll(buffer)
	require.Equal(t, []int64{2, 3}, ids)
	require.Equal(t, heldRetry.Min, r.session.held)
	r.step()
	require.Equal(t, 2*heldRetry.Min, r.session.held, "it is looked for less and less often")
	for range 20 {
		r.step()
	}
	require.Equal(t, heldRetry.Max, r.session.held)
	r.transaction(1004, stored{id: 6, topic: "topic"})
	r.step()
	require.Equal(t, heldRetry.Min, r.session.held, "one that has only come is soon seen")

	// In the order in which they committed, with one that came since.
	r.transaction(1000, stored{id: 5, topic: "topic"})
	r.visible("1005:1005:")
	r.step()
	ids, _ = takeAll(buffer)
	require.Equal(t, []int64{1, 4, 6, 5}, ids)
	require.Zero(t, r.session.held)
	require.Empty(t, r.session.transactions)
	require.Zero(t, r.session.bytes)
}

// A transaction that a barrier saw passes while it comes in: a huge one is never
// held as a whole. One that none saw is held in parts, and in its place.
func TestTransactionPassesInParts(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	buffer := r.attach("topic", "group")
	r.visible("1001:1003:1001")
	r.transaction(1001, stored{id: 9, topic: "topic"}) // held
	r.begin(1002)
	r.insert(1002, stored{id: 1, topic: "topic"}, stored{id: 2, topic: "topic"})
	r.step()
	ids, _ := takeAll(buffer)
	require.Equal(t, []int64{1, 2}, ids)

	r.visible("1004:1004:")
	r.step()
	ids, _ = takeAll(buffer)
	require.Equal(t, []int64{9}, ids)
	asked := r.server.count(kindBarrier)
	for id := int64(3); id < 10; id++ {
		r.insert(1002, stored{id: id, topic: "topic"})
		r.step()
		ids, _ = takeAll(buffer)
		require.Equal(t, []int64{id}, ids)
	}
	require.Equal(t, asked, r.server.count(kindBarrier), "a barrier has seen it already")
	r.commit(0)
	r.step()
	require.Empty(t, r.session.transactions)

	r.visible("1004:1005:1004")
	r.begin(1004)
	for id := int64(10); id < 13; id++ {
		r.insert(1004, stored{id: id, topic: "topic"})
		r.step()
		ids, _ = takeAll(buffer)
		require.Empty(t, ids)
	}
	r.visible("1005:1005:")
	r.step()
	r.insert(1004, stored{id: 13, topic: "topic"})
	r.commit(0)
	r.step()
	ids, _ = takeAll(buffer)
	require.Equal(t, []int64{10, 11, 12, 13}, ids)
	require.Zero(t, r.session.bytes)
}

// Other topics, and transactions without any, cost nothing, and no barrier.
func TestUnwantedRowsAreForgotten(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	buffer := r.attach("topic", "group")
	r.transaction(1001)
	r.transaction(1002, stored{id: 1, topic: "other"})
	require.Empty(t, r.session.transactions)
	r.step()
	require.Zero(t, r.server.count(kindBarrier))
	r.transaction(1003, stored{id: 2, topic: "other"}, stored{id: 3, topic: "topic"}, stored{id: 4, topic: "other"})
	r.step()
	ids, _ := takeAll(buffer)
	require.Equal(t, []int64{3}, ids)
	require.Zero(t, r.session.foreign)
}

// Rows that were restored or copied in name another transaction than the one
// that wrote them. What is known of that one says nothing of them: they are left
// to the windows.
func TestForeignRowsAreLeftOut(t *testing.T) {
	t.Parallel()

	const epoch = 1 << 32
	r := newRig(t, testBytes, "topic")
	buffer := r.attach("topic", "group")
	r.visible(fmt.Sprintf("%d:%d:", epoch+2000, epoch+2000))
	r.transaction(
		1001, stored{id: 1, topic: "topic", xid: epoch + 1001}, stored{id: 2, topic: "topic", xid: epoch + 1000},
		stored{id: 3, topic: "topic", xid: epoch + 1001, era: 8}, stored{id: 4, topic: "topic", xid: epoch + 1001},
	)
	r.step()
	ids, _ := takeAll(buffer)
	require.Equal(t, []int64{1, 4}, ids)
	require.Equal(t, uint64(2), r.source.Status().Foreign)
}

// One barrier of another life, or of an altered publication, and nothing more
// goes out: what the stream left out cannot be known.
func TestAnotherIdentityEndsTheSession(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		change func(s *fakeServer)
		want   error
	}{
		"publication altered": {func(s *fakeServer) { s.publication = "altered" }, errPublicationChanged},
		"publication dropped": {func(s *fakeServer) { s.publication = nil }, errPublicationChanged},
		"crash":               {func(s *fakeServer) { s.boot = nil }, errOtherServer},
		"failover":            {func(s *fakeServer) { s.timeline = "00000002" }, errOtherServer},
		"another cluster":     {func(s *fakeServer) { s.era = 8 }, errOtherServer},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := newRig(t, testBytes, "topic")
			buffer := r.attach("topic", "group")
			r.session.samples = []sample{{snapshot: snapshot(t, "900:900:")}}
			r.transaction(1001, stored{id: 1, topic: "topic"})
			r.server.set(test.change)
			err := r.session.step(t.Context(), true)
			require.ErrorIs(t, err, test.want)
			ids, samples := takeAll(buffer)
			require.Empty(t, ids)
			require.Empty(t, samples, "a sample that is not passed is void")
		})
	}
}

// A row above the whole bound closed the buffers of all other topics first, and
// then did not fit all the same. It is refused by itself: its own topic goes to
// the table when its turn comes, and may come back at once.
func TestOversizedRowIsRefusedAlone(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "a", "b", "big")
	a, b, big := r.attach("a", "group"), r.attach("b", "group"), r.attach("big", "group")
	r.transaction(1001, stored{id: 1, topic: "a"}, stored{id: 2, topic: "b"}, stored{id: 3, topic: "big"})
	r.step()
	r.visible("1002:1002:")
	r.transaction(1002, stored{id: 4, topic: "a"}, stored{id: 5, topic: "big", payload: testBytes}, stored{id: 6, topic: "b"})
	require.NoError(t, a.Err())
	require.NoError(t, b.Err())
	r.step()
	require.NoError(t, big.Err(), "the transaction is held, so nothing of it is missing yet")
	r.visible("1003:1003:")
	r.step()
	require.ErrorIs(t, big.Err(), errRefused)
	ids, _ := takeAll(big)
	require.Empty(t, ids)
	require.NoError(t, a.Err())
	require.NoError(t, b.Err())
	ids, _ = takeAll(a)
	require.Equal(t, []int64{1, 4}, ids)
	ids, _ = takeAll(b)
	require.Equal(t, []int64{2, 6}, ids)
	require.Zero(t, r.session.bytes)

	again := r.attach("big", "group")
	r.transaction(1003, stored{id: 7, topic: "big"})
	r.visible("1004:1004:")
	r.step()
	ids, _ = takeAll(again)
	require.Equal(t, []int64{7}, ids)
}

// When the bound is used up, room is made where most is used: the fullest buffer
// is closed, or the topic with most in transactions, which may not be in the table
// yet, is refused.
func TestRoomIsMadeWhereMostIsUsed(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "slow", "slower", "quick")
	slow, slower, quick := r.attach("slow", "group"), r.attach("slower", "group"), r.attach("quick", "group")
	r.transaction(1001, stored{id: 1, topic: "slow", payload: 20 << 10}, stored{id: 2, topic: "slower", payload: 30 << 10}, stored{id: 3, topic: "quick"})
	r.step()
	r.transaction(1002, stored{id: 4, topic: "quick", payload: 5 << 10}, stored{id: 5, topic: "quick", payload: 15 << 10})
	require.ErrorIs(t, slower.Err(), errRefused)
	r.step()
	require.NoError(t, slow.Err())
	require.NoError(t, quick.Err())
	ids, _ := takeAll(quick)
	require.Equal(t, []int64{3, 4, 5}, ids)
	ids, _ = takeAll(slow)
	require.Equal(t, []int64{1}, ids)
	require.Zero(t, r.session.bytes)

	// A bulk load is held: it makes room for others, and none of it goes out.
	slower = r.attach("slower", "group")
	r.transaction(1003, stored{id: 6, topic: "slower", payload: 5 << 10})
	r.step()
	r.visible("1004:1004:")
	r.transaction(1004, stored{id: 7, topic: "quick"}, stored{id: 8, topic: "slow", payload: 25 << 10})
	r.transaction(1005, stored{id: 9, topic: "slow", payload: 25 << 10}, stored{id: 10, topic: "quick", payload: 20 << 10}, stored{id: 11, topic: "slow"})
	require.Less(t, r.session.bytes, 27<<10)
	require.NoError(t, slow.Err(), "what comes before may still be taken")
	require.NoError(t, slower.Err())
	r.visible("1005:1005:")
	r.step()
	require.ErrorIs(t, slow.Err(), errRefused)
	ids, _ = takeAll(quick)
	require.Equal(t, []int64{7}, ids)

	// Who attaches now has not seen the other half in the table, either.
	again := r.attach("slow", "group")
	r.visible("1006:1006:")
	r.step()
	require.ErrorIs(t, again.Err(), errRefused)
	ids, _ = takeAll(again)
	require.Empty(t, ids)
	ids, _ = takeAll(quick)
	require.Equal(t, []int64{10}, ids)
	ids, _ = takeAll(slower)
	require.Equal(t, []int64{6}, ids)
	require.Zero(t, r.session.bytes)
	for name, topic := range r.session.topics {
		require.Zero(t, topic.pending, name)
	}

	again = r.attach("slow", "group")
	r.transaction(1006, stored{id: 12, topic: "slow"})
	r.visible("1007:1007:")
	r.step()
	ids, _ = takeAll(again)
	require.Equal(t, []int64{12}, ids)
}

// A reader that hung in its handler kept what was in its buffer when the stream
// lagged, or ended. It counted against the bound until it came back, perhaps for
// ever: no other topic could be live.
func TestClosedBufferGivesItsBytesBack(t *testing.T) {
	t.Parallel()

	// fill leaves a reader with nearly the whole bound in its buffer.
	fill := func(r *rig) *Buffer {
		stuck := r.attach("stuck", "group")
		for i := range 6 {
			r.transaction(uint32(1001+i), stored{id: int64(1 + i), topic: "stuck", payload: 10 << 10})
			r.step()
		}
		require.Greater(r.t, r.session.bytes, testBytes-10<<10)
		return stuck
	}
	requireDropped := func(r *rig, stuck *Buffer, why error) {
		require.Zero(r.t, r.session.bytes)
		require.ErrorIs(r.t, stuck.Err(), why)
		require.True(r.t, isGone(stuck), "it shows whatever the reader does")
		rows, sample, found, closed := stuck.take(window.Limits{Rows: 100, Bytes: 1 << 20})
		require.Empty(r.t, rows)
		require.True(r.t, sample.Empty())
		require.False(r.t, found)
		require.True(r.t, closed)
		require.Zero(r.t, r.session.bytes)
	}

	t.Run("when the stream lags", func(t *testing.T) {
		t.Parallel()

		r := newRig(t, testBytes, "stuck", "quick")
		stuck, quick := fill(r), r.attach("quick", "group")
		now := time.Now()
		r.session.samples = []sample{{flush: 8, at: now.Add(-time.Second)}}
		r.session.watchLag(now)
		require.True(t, r.session.lagging)
		requireDropped(r, stuck, errLagging)
		requireDropped(r, quick, errLagging)
		require.Nil(t, r.session.attach("quick", "group", Shard{}), "the stream lags")

		r.session.samples = nil
		r.session.watchLag(now)
		r.session.watchLag(now.Add(steady))
		for i := range 10 {
			quick := r.attach("quick", "group")
			r.transaction(uint32(2001+i), stored{id: int64(100 + i), topic: "quick", payload: 10 << 10})
			r.step()
			require.NoError(t, quick.Err(), "a reader with nothing in its buffer was detached")
			ids, _ := takeAll(quick)
			require.Equal(t, []int64{int64(100 + i)}, ids)
		}
	})

	t.Run("when the stream ends", func(t *testing.T) {
		t.Parallel()

		r := newRig(t, testBytes, "stuck")
		stuck := fill(r)
		r.session.end(errOtherServer)
		requireDropped(r, stuck, errOtherServer)
	})

	t.Run("when the reader leaves", func(t *testing.T) {
		t.Parallel()

		r := newRig(t, testBytes, "stuck")
		stuck := fill(r)
		stuck.Close()
		stuck.Close()
		requireDropped(r, stuck, errEnded)
		r.transaction(2001, stored{id: 100, topic: "stuck"})
		r.step()
		requireDropped(r, stuck, errEnded)
	})
}

// What was held went to the buffers of all groups at once, and counts once for
// each: fifty groups held fifty times the bound.
func TestFanOutStaysWithinTheBound(t *testing.T) {
	t.Parallel()

	const groups = 50
	for name, test := range map[string]struct {
		held, perTransaction int // bytes, and rows
		stay                 bool
	}{
		"many transactions": {testBytes * 9 / 10, 1, false}, // there is no room for any group
		"few transactions":  {testBytes * 9 / 10, 50, false},
		"one transaction":   {testBytes * 9 / 10, 1000, true},
		"a few rows":        {testBytes / groups * 9 / 10, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := newRig(t, testBytes, "topic")
			var buffers []*Buffer
			for i := range groups {
				buffers = append(buffers, r.attach("topic", fmt.Sprint(i)))
			}
			r.visible("1000:1000:")
			sent := 0
			for xid := uint32(1001); r.session.bytes < test.held; xid++ {
				r.begin(xid)
				for i := 0; i < test.perTransaction && r.session.bytes < test.held; i++ {
					sent++
					r.insert(xid, stored{id: int64(sent), topic: "topic"})
				}
				r.commit(0)
			}
			for _, buffer := range buffers {
				require.NoError(t, buffer.Err(), "nothing was handed over yet")
			}
			r.visible("9000:9000:")
			r.step()
			require.LessOrEqual(t, r.session.bytes, testBytes)

			total, stay := 0, 0
			for _, buffer := range buffers {
				total += buffer.bytes
				if buffer.Err() == nil {
					stay++
					ids, _ := takeAll(buffer)
					require.Len(t, ids, sent, "a buffer that is open has all")
				}
			}
			require.LessOrEqual(t, total, testBytes)
			require.Zero(t, r.session.bytes)
			if test.stay {
				require.Positive(t, stay)
			} else {
				require.Less(t, stay, groups)
			}
		})
	}
}

// A transaction that had done some work and then waited for something has its
// last record on disk up to a page's end, not to its own: the server cannot send
// that, and the stream counted as lagging for as long as it waited.
func TestHalfFlushedRecordIsNoLag(t *testing.T) {
	t.Parallel()

	const page = 8192
	r := newRig(t, testBytes, "topic")
	buffer := r.attach("topic", "group")
	now := time.Now()
	lag := func(samples ...sample) bool {
		r.session.samples = samples
		r.session.watchLag(now)
		return r.session.lagging
	}
	r.session.received = 3*page - 100
	old, young := now.Add(-time.Hour), now.Add(-400*time.Millisecond)
	require.False(t, lag(sample{flush: 3 * page, insert: 3*page + 50, at: old}))
	require.False(t, lag(sample{flush: 3*page - 100, at: old}), "it has come to there")
	require.False(t, lag(sample{flush: 3 * page, at: old}, sample{flush: 3*page + 8, at: young}), "not for long enough")
	require.NoError(t, buffer.Err())
	require.True(t, lag(sample{flush: 3 * page, at: old}, sample{flush: 3*page + 8, at: old}))
	require.ErrorIs(t, buffer.Err(), errLagging)
}

// Readers come back when the stream has kept up for a while, without a break.
func TestLagEndsWhenTheStreamKeepsUp(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	now := time.Now()
	behind := []sample{{flush: 8, at: now.Add(-time.Minute)}}
	for _, step := range []struct {
		after   time.Duration
		samples []sample
		lagging bool
	}{
		{0, nil, false},
		{0, behind, true},
		{steady, nil, true}, // since now
		{2*steady - 1, nil, true},
		{2*steady - 1, behind, true},
		{2 * steady, nil, true}, // again
		{3*steady - 1, nil, true},
		{3 * steady, nil, false},
		{4 * steady, nil, false},
	} {
		r.session.samples = step.samples
		r.session.watchLag(now.Add(step.after))
		require.Equal(t, step.lagging, r.session.lagging, "%s", step.after)
		require.Equal(t, step.lagging, r.session.attach("topic", "group", Shard{}) == nil)
	}
}

// A sample says that everything it sees is in front of it. So it waits until the
// stream has passed the end that the log had, and goes behind what came until
// then.
func TestSampleWaitsForTheStream(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic", "quiet")
	buffer, quiet := r.attach("topic", "group"), r.attach("quiet", "group")
	r.server.set(func(s *fakeServer) { s.snapshot, s.insert = "1002:1002:", "0/100" })
	r.transaction(1001, stored{id: 1, topic: "topic"})
	r.step()
	ids, samples := takeAll(buffer)
	require.Equal(t, []int64{1}, ids)
	require.Empty(t, samples, "transactions that it sees may still come")

	// All that the sample sees has come, but a barrier must see it, too.
	r.server.set(func(s *fakeServer) { s.snapshot, s.insert = "1004:1004:", "0/200" })
	r.begin(1000)
	r.insert(1000, stored{id: 2, topic: "topic"})
	r.commit(0x100)
	r.transaction(1004, stored{id: 3, topic: "topic"}) // held
	_, samples = takeAll(buffer)
	require.Empty(t, samples)
	r.step()
	for _, b := range []*Buffer{buffer, quiet} {
		_, samples = takeAll(b)
		require.Equal(t, []window.Snapshot{snapshot(t, "1002:1002:")}, samples)
	}

	// A position counts as passed only if the barrier was asked afterwards.
	r.barrier.before = func(_ context.Context, kind string) error {
		r.begin(1003)
		r.insert(1003, stored{id: 4, topic: "topic"})
		r.commit(0x200)
		r.receive(&replication.Keepalive{WALEnd: 0x300})
		return nil
	}
	r.step()
	ids, samples = takeAll(buffer)
	require.Equal(t, []int64{4}, ids)
	require.Empty(t, samples)
	r.barrier.before = nil
	r.step()
	_, samples = takeAll(buffer)
	require.Equal(t, []window.Snapshot{snapshot(t, "1004:1004:")}, samples)
	require.Equal(t, replication.LSN(0x300), r.source.Status().Received)
}

// Samples that are not passed do not pile up: the first, which tells the lag,
// and the newest stay.
func TestSamplesAreBounded(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	for i := range 2 * maxSamples {
		r.session.sample(sample{insert: replication.LSN(1 + i)}, 0)
	}
	require.Len(t, r.session.samples, maxSamples)
	require.Equal(t, replication.LSN(1), r.session.samples[0].insert)
	require.Equal(t, replication.LSN(2*maxSamples), r.session.samples[maxSamples-1].insert)
}

// A topic's readers attach when all transactions have ended whose rows the
// stream may not have: those that began before the slot was there, or, of a topic
// that nobody wanted then, before it was.
func TestTopicsAreReadyWhenOlderTransactionsHaveEnded(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes)
	first := r.source.Want(window.One("first"))
	first.Close()
	r.session.begin = 600
	r.session.want(window.One("first"), 0)
	settle := func(snapshot string) {
		t.Helper()
		r.visible(snapshot)
		answer, err := r.source.ask(t.Context())
		require.NoError(t, err)
		require.NoError(t, r.session.settle(t.Context(), answer))
	}
	changed := r.source.Changed()
	settle("599:700:599")
	require.False(t, first.Ready())
	require.Nil(t, first.Attach("group", Shard{}))
	settle("600:700:600")
	require.True(t, first.Ready())
	<-changed
	require.Equal(t, Open, r.source.Status().State)
	require.Zero(t, r.server.count(kindDraw))

	// While its id is drawn, another one comes, for which the id is too old.
	second := r.source.Want(window.One("second"))
	var third *Interest
	r.barrier.before = func(_ context.Context, kind string) error {
		if kind == kindDraw {
			third = r.source.Want(window.One("third"))
		}
		return nil
	}
	r.server.set(func(s *fakeServer) { s.drawn = 799 })
	settle("900:900:")
	require.False(t, second.Ready())
	r.barrier.before = nil
	settle("799:900:799") // and draws for the third
	require.False(t, second.Ready())
	settle("800:900:800")
	require.True(t, second.Ready())
	require.False(t, third.Ready())
	settle("801:900:801")
	require.True(t, third.Ready())
	require.Equal(t, 2, r.server.count(kindDraw))

	require.True(t, first.Ready())
	buffer := second.Attach("group", Shard{})
	require.False(t, buffer.Follow(snapshot(t, "799:900:799"), window.Life{Era: 7, Boot: "boot"}), "an older transaction may still commit")
	require.False(t, buffer.Follow(snapshot(t, "900:900:"), window.Life{Era: 7, Boot: "another"}))
	require.True(t, buffer.Follow(snapshot(t, "800:900:850"), window.Life{Era: 7, Boot: "boot"}))
	require.Equal(t, window.Life{Era: 7, Boot: "boot"}, buffer.Life())
	require.Equal(t, 1, r.source.Status().Attached)

	// When it is wanted again, rows may have been left out in between.
	buffer.Close()
	second.Close()
	require.False(t, second.Ready())
	second = r.source.Want(window.One("second"))
	settle("900:900:")
	require.False(t, second.Ready())
	settle("900:900:")
	require.True(t, second.Ready())
}

// A new subscription had an id drawn for its topic through the pool, by the
// dispatcher. While the pool was busy no topic got anything, and no reader was
// told to poll. The same goes for the look at the slot.
func TestBusyPoolKeepsNobodyWaiting(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, testBytes, "topic")
		var looks atomic.Int64
		r.pool.before = func(ctx context.Context, kind string) error {
			looks.Add(1)
			return never(ctx, kind)
		}
		buffer := r.attach("topic", "group")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.session.run(ctx) }()
		deliver := func(n int64) {
			began := time.Now()
			r.transaction(uint32(1000+n), stored{id: n, topic: "topic"})
			waiting, stop := context.WithTimeout(ctx, time.Minute)
			defer stop()
			for {
				rows, _, ok := buffer.Next(waiting, window.Limits{Rows: 10, Bytes: 1 << 20})
				require.True(t, ok, "nothing came; detached: %v", buffer.Err())
				if len(rows) > 0 {
					require.Equal(t, n, rows[0].ID)
					break
				}
			}
			require.Less(t, time.Since(began), 10*time.Millisecond)
		}
		deliver(1)
		later := r.source.Want(window.One("later"))
		r.server.set(func(s *fakeServer) { s.drawn = 999 })
		for n := int64(2); n < 100; n++ { // for longer than a look at the slot takes to be due
			deliver(n)
			time.Sleep(50 * time.Millisecond)
		}
		require.True(t, later.Ready(), "its id was drawn")
		require.Positive(t, looks.Load(), "a look at the slot waits for the pool")
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
	})
}

// A session ends by itself when no reader wants it, and when its slot is in the
// way.
func TestRunEnds(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		change func(r *rig)
		want   error
	}{
		"nobody wants it": {func(r *rig) { delete(r.source.wanted, "topic") }, errIdle},
		"too much WAL":    {func(r *rig) { r.server.pinned = 5000 }, errPinned},
		"another life":    {func(r *rig) { r.server.boot = "another" }, errOtherServer},
		"another server":  {func(r *rig) { r.server.slotless = true }, errOtherServer},
		"no answer":       {func(r *rig) { r.barrier.before = never }, context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, testBytes, "topic")
				buffer := r.attach("topic", "group")
				test.change(r)
				ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, errors.New("it does not end"))
				defer cancel()
				err := r.session.run(ctx)
				require.ErrorIs(t, err, test.want)
				r.session.end(err)
				_, _, ok := buffer.Next(ctx, window.Limits{Rows: 1, Bytes: 1})
				require.False(t, ok)
				require.ErrorIs(t, buffer.Err(), test.want)
			})
		})
	}
}

// After its end a session takes nothing in, and nobody: what the stream still
// says goes nowhere.
func TestNothingComesInAfterTheEnd(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	r.visible("1000:1000:")
	r.begin(1001)
	r.insert(1001, stored{id: 1, topic: "topic"})
	r.session.end(errOtherServer)
	require.Empty(t, r.session.transactions)
	require.ErrorIs(t, r.session.receive(insertOf(1001, stored{id: 2, topic: "topic"})), errEnded)
	require.ErrorIs(t, r.session.receive(&replication.Keepalive{WALEnd: 8}), errEnded)
	require.Nil(t, r.session.attach("topic", "group", Shard{}))
	interest := &Interest{source: r.source, key: "topic"}
	require.False(t, interest.Ready())
	r.source.session = nil
	require.False(t, interest.Ready())
	require.Nil(t, interest.Attach("group", Shard{}))
}

// What the stream cannot say ends it, with its place.
func TestStreamOutOfOrderIsAnError(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	require.ErrorContains(t, r.session.receive(insertOf(1001, stored{id: 0x1234, topic: "topic"})), "insert at 0/1234 outside")
	require.ErrorContains(t, r.session.receive(&replication.Commit{CommitLSN: 0x5678}), "commit at 0/5678 without")
	require.NoError(t, r.session.receive(&replication.Message{}))
	require.NoError(t, r.session.receive(logRelation))
}
