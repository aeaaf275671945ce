package replication

// Relation describes a table before its first change comes, again before the
// first change after it was altered, and at times again for no visible reason.
// It is an event; the changes point to the one that is in force for them. It
// never changes, and may be kept.
type Relation struct {
	// OID identifies the table; it stays the same when the table is altered or
	// renamed.
	OID uint32
	// Schema is "" for pg_catalog.
	Schema string
	Name   string
	// Identity is the table's replica identity, as in pg_class.relreplident: d
	// for the primary key, n for nothing, f for the whole row, i for an index.
	Identity byte
	// Columns are those that are published.
	Columns []Column
}

// Column is a column of a relation.
type Column struct {
	Name string
	// Key says that the column is part of the replica identity.
	Key bool
	// TypeOID identifies its data type, in pg_type.
	TypeOID uint32
	// TypeModifier is for instance the length of a varchar, or -1.
	TypeModifier int32
}

// Column returns the place of a column in the relation's tuples, or -1.
func (r *Relation) Column(name string) int {
	for i := range r.Columns {
		if r.Columns[i].Name == name {
			return i
		}
	}
	return -1
}
