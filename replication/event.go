package replication

import (
	"slices"
	"time"
)

// Event is something that the stream says. It is one of
//
//	*Begin *Commit *Insert *Update *Delete *Truncate *Message
//	*Relation *Type *Origin *Keepalive
//
// Events are reused: one is valid until the next is asked for, or until the
// function that got it returns, and so are its tuples and their bytes. Clone
// what is to live longer. A *Relation is never changed and may be kept.
type Event interface {
	// Clone returns a copy that stays valid.
	Clone() Event

	// isEvent keeps the list above complete.
	isEvent()
}

// Begin opens a transaction. All that follows up to its Commit belongs to it,
// transactions do not overlap.
type Begin struct {
	// LSN is where the transaction's first change is in the WAL.
	LSN LSN
	// FinalLSN is where its commit record is, the CommitLSN of its Commit.
	FinalLSN LSN
	// CommitTime is the server's clock at the commit.
	CommitTime time.Time
	// XID is the lower half of the transaction's id, see WidenXID. Changes in
	// subtransactions count as the transaction's.
	XID uint32
}

// Commit closes a transaction.
type Commit struct {
	// CommitLSN is where the commit record begins.
	CommitLSN LSN
	// EndLSN is where it ends. This is what to confirm, see the package's
	// documentation.
	EndLSN     LSN
	CommitTime time.Time
}

// Insert is a new row.
type Insert struct {
	// LSN is where the change is in the WAL. Changes of one statement may share
	// it, and it may be less than that of an earlier transaction's changes.
	LSN      LSN
	Relation *Relation
	// New has a value for each of the relation's columns.
	New Tuple
}

// Update is a changed row.
type Update struct {
	LSN      LSN
	Relation *Relation
	// OldKind says what Old is: nothing, unless the columns of the replica
	// identity have changed (OldKey) or the replica identity is FULL (OldRow).
	OldKind OldKind
	Old     Tuple
	// New is the whole row, but values stored out of line that have not changed
	// are Unchanged. With OldRow they are found in Old.
	New Tuple
}

// Delete is a row that is gone.
type Delete struct {
	LSN      LSN
	Relation *Relation
	// OldKind is OldKey, or OldRow if the replica identity is FULL.
	OldKind OldKind
	Old     Tuple
}

// OldKind says what is known of a row as it was.
type OldKind byte

const (
	// OldNone is nothing.
	OldNone OldKind = 0
	// OldKey is a tuple in which only the columns of the replica identity have
	// their values; the others are null.
	OldKey OldKind = 'K'
	// OldRow is the whole row.
	OldRow OldKind = 'O'
)

// Truncate empties tables, all by one command.
type Truncate struct {
	LSN       LSN
	Relations []*Relation
	Cascade   bool
	// RestartIdentity says that sequences were reset.
	RestartIdentity bool
}

// Message is a logical message, from pg_logical_emit_message.
type Message struct {
	// LSN is where the message is in the WAL.
	LSN LSN
	// Transactional messages come inside their transaction, when it has
	// committed. The others come at once, outside of any.
	Transactional bool
	Prefix        string
	Content       []byte
}

// Type is the name of a data type that is not built in. It comes before the
// first relation that uses it.
type Type struct {
	OID uint32
	// Schema is "" for pg_catalog.
	Schema string
	Name   string
}

// Origin says that the transaction was itself replicated to this server, and
// from where. It follows Begin.
type Origin struct {
	// CommitLSN is the commit's position on the server of origin.
	CommitLSN LSN
	Name      string
}

// Keepalive says how far the server has come. All transactions that committed
// before WALEnd have been sent before it. One that comes in the middle of a
// transaction ends before that one's commit.
type Keepalive struct {
	WALEnd LSN
	// ServerTime is the server's clock when it sent this.
	ServerTime time.Time
}

// Clone implements Event.
func (e *Begin) Clone() Event { return clone(e) }

// Clone implements Event.
func (e *Commit) Clone() Event { return clone(e) }

// Clone implements Event.
func (e *Insert) Clone() Event {
	c := clone(e)
	c.New = e.New.Clone()
	return c
}

// Clone implements Event.
func (e *Update) Clone() Event {
	c := clone(e)
	c.Old, c.New = e.Old.Clone(), e.New.Clone()
	return c
}

// Clone implements Event.
func (e *Delete) Clone() Event {
	c := clone(e)
	c.Old = e.Old.Clone()
	return c
}

// Clone implements Event.
func (e *Truncate) Clone() Event {
	c := clone(e)
	c.Relations = slices.Clone(e.Relations)
	return c
}

// Clone implements Event.
func (e *Message) Clone() Event {
	c := clone(e)
	c.Content = slices.Clone(e.Content)
	return c
}

// Clone implements Event. It returns the relation itself, which never changes.
func (r *Relation) Clone() Event { return r }

// Clone implements Event.
func (e *Type) Clone() Event { return clone(e) }

// Clone implements Event.
func (e *Origin) Clone() Event { return clone(e) }

// Clone implements Event.
func (e *Keepalive) Clone() Event { return clone(e) }

func clone[T any](e *T) *T {
	c := *e
	return &c
}

func (*Begin) isEvent()     {}
func (*Commit) isEvent()    {}
func (*Insert) isEvent()    {}
func (*Update) isEvent()    {}
func (*Delete) isEvent()    {}
func (*Truncate) isEvent()  {}
func (*Message) isEvent()   {}
func (*Relation) isEvent()  {}
func (*Type) isEvent()      {}
func (*Origin) isEvent()    {}
func (*Keepalive) isEvent() {}
