package schema

import (
	"fmt"

	"github.com/jackc/pgx/v5"
)

// PublicationName returns the name of the publication through which the WAL of
// the schema called name is read. It is the schema's own: publications are in
// no schema, and each outbox of a database needs one.
func PublicationName(name string) string { return name }

// PublicationSQL returns the one statement that creates the publication. Migrate
// runs it, too, and goes on without a publication where the role lacks CREATE on
// the database. Then this is for somebody who may: a superuser, or the owner of
// the tables once CREATE is granted. Running it again fails with 42710
// (duplicate_object).
func PublicationSQL(cfg Config) (string, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return "", err
	}
	return createPublication(cfg.Name) + ";", nil
}

// createPublication is the statement of migration 2, which stays as it was
// released.
func createPublication(name string) string {
	return fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE %s.messages WITH (publish = 'insert', publish_via_partition_root = true)",
		pgx.Identifier{PublicationName(name)}.Sanitize(), pgx.Identifier{name}.Sanitize())
}
