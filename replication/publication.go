package replication

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Table names a table.
type Table struct{ Schema, Name string }

// String returns the table's name as SQL, quoted.
func (t Table) String() string { return pgx.Identifier{t.Schema, t.Name}.Sanitize() }

// Publication says which changes of which tables are streamed.
type Publication struct {
	Name string
	// OID identifies it: a publication dropped and made again has another.
	// CreatePublication takes no notice of it.
	OID uint32
	// AllTables stands for every table of the database, future ones included.
	// Making such a publication takes a superuser.
	AllTables bool
	// Tables are the published ones. A publication that is read back lists
	// those of AllTables and of whole schemas, too, and, without ViaRoot, the
	// partitions instead of a partitioned table.
	Tables []Table
	// What is published.
	Insert, Update, Delete, Truncate bool
	// ViaRoot publishes the changes of partitions as changes of the table they
	// are partitions of. Without it each partition is a relation of its own.
	ViaRoot bool
}

// CheckPublicationName returns an ErrInvalidName for a name that PostgreSQL
// would not take, or not keep whole.
func CheckPublicationName(name string) error {
	return checkIdentifier("publication", name)
}

func checkIdentifier(kind, name string) error {
	if name == "" || len(name) > 63 || strings.ContainsRune(name, 0) {
		return fmt.Errorf("%w: %s %.80q (1 to 63 bytes without NUL)", ErrInvalidName, kind, name)
	}
	return nil
}

// execer is an ordinary connection, a transaction or a pool of pgx.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// CreatePublication creates a publication, over an ordinary connection. Create
// it before the slots of its streams: a change is decoded with the publications
// that there were when it was made.
func CreatePublication(ctx context.Context, db execer, p Publication) error {
	sql, err := p.createCommand()
	if err != nil {
		return err
	}
	if _, err := db.Exec(ctx, sql); err != nil {
		return wrap("create publication", p.Name, aboutPublication, err)
	}
	return nil
}

func (p Publication) createCommand() (string, error) {
	if err := CheckPublicationName(p.Name); err != nil {
		return "", err
	}
	sql := "CREATE PUBLICATION " + pgx.Identifier{p.Name}.Sanitize()
	switch {
	case p.AllTables && len(p.Tables) > 0:
		return "", fmt.Errorf("replication: publication %q is of all tables, so none may be named", p.Name)
	case p.AllTables:
		sql += " FOR ALL TABLES"
	case len(p.Tables) == 0:
		return "", fmt.Errorf("replication: publication %q has no tables", p.Name)
	default:
		names := make([]string, len(p.Tables))
		for i, table := range p.Tables {
			if err := errors.Join(checkIdentifier("schema", table.Schema), checkIdentifier("table", table.Name)); err != nil {
				return "", err
			}
			names[i] = table.String()
		}
		sql += " FOR TABLE " + strings.Join(names, ", ")
	}
	var publish []string
	for _, kind := range []struct {
		name      string
		published bool
	}{{"insert", p.Insert}, {"update", p.Update}, {"delete", p.Delete}, {"truncate", p.Truncate}} {
		if kind.published {
			publish = append(publish, kind.name)
		}
	}
	if len(publish) == 0 {
		return "", fmt.Errorf("replication: publication %q publishes nothing", p.Name)
	}
	return fmt.Sprintf("%s WITH (publish = '%s', publish_via_partition_root = %t)", sql, strings.Join(publish, ", "), p.ViaRoot), nil
}

//go:embed queries/publication.sql
var publicationQuery string

// DescribePublication returns a publication as it is now, or
// ErrPublicationMissing. It goes over an ordinary connection and takes no
// special privilege.
func DescribePublication(ctx context.Context, db querier, name string) (Publication, error) {
	const op = "describe publication"
	rows, err := db.Query(ctx, publicationQuery, name)
	if err != nil {
		return Publication{}, wrap(op, name, aboutPublication, err)
	}
	p := Publication{Name: name}
	var schema, table *string
	found := false
	_, err = pgx.ForEachRow(rows,
		[]any{&p.OID, &p.AllTables, &p.Insert, &p.Update, &p.Delete, &p.Truncate, &p.ViaRoot, &schema, &table},
		func() error {
			found = true
			if schema != nil && table != nil {
				p.Tables = append(p.Tables, Table{Schema: *schema, Name: *table})
			}
			return nil
		})
	if err != nil {
		return Publication{}, wrap(op, name, aboutPublication, err)
	}
	if !found {
		return Publication{}, &Error{Op: op, Name: name, Reason: ErrPublicationMissing}
	}
	return p, nil
}

// PublicationExists reports whether there is a publication of this name.
func PublicationExists(ctx context.Context, db querier, name string) (bool, error) {
	_, err := DescribePublication(ctx, db, name)
	if errors.Is(err, ErrPublicationMissing) {
		return false, nil
	}
	return err == nil, err
}
