package schema

import (
	"errors"
	"fmt"
)

// ErrNotInstalled is returned by Check, Migrate's callers and the constructors
// of package outbox when the schema, or a table in it, does not exist. Run
// Migrate, or the script that SQL prints, with a role that may create it.
var ErrNotInstalled = errors.New("outbox tables are not installed: run schema.Migrate or the script printed by schema.SQL")

// VersionError says that the installed tables belong to another version of the
// library. An older one wants Migrate; a newer one wants a newer library.
type VersionError struct {
	Schema string
	Have   int // in the database
	Want   int // by this library
}

// Error implements error.
func (e *VersionError) Error() string {
	if e.Have > e.Want {
		return fmt.Sprintf("schema %q has version %d, this library knows versions up to %d: update the library before it touches the tables",
			e.Schema, e.Have, e.Want)
	}
	return fmt.Sprintf("schema %q has version %d, this library needs %d: run schema.Migrate or the script printed by schema.SQL",
		e.Schema, e.Have, e.Want)
}

// MigrationError says which migration failed. Nothing of it, nor of those
// before it in the same call, is in the database.
type MigrationError struct {
	Schema  string
	Version int
	Name    string
	Err     error
}

// Error implements error.
func (e *MigrationError) Error() string {
	return fmt.Sprintf("schema %q: migration %d (%s) failed and was rolled back: %v", e.Schema, e.Version, e.Name, e.Err)
}

// Unwrap returns the server's error.
func (e *MigrationError) Unwrap() error { return e.Err }
