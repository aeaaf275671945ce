package schema

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed check.sql
var checkText string

//go:embed check_live.sql
var checkLiveText string

// Severity says what a difference leads to.
type Severity string

const (
	// SeverityError: messages may be lost, doubled or out of order, or
	// statements fail.
	SeverityError Severity = "error"
	// SeverityWarning: nothing is lost, but somebody should know.
	SeverityWarning Severity = "warning"
	// SeverityLive: nothing is wrong with polling, but subscribers cannot read
	// the WAL.
	SeverityLive Severity = "live"
)

// Difference is one thing that is not as the library expects it.
type Difference struct {
	Severity Severity
	Object   string // such as "index messages_topic_era_id"
	Found    string
	Want     string
	Remedy   string
}

// String returns the difference as one line.
func (d Difference) String() string {
	return fmt.Sprintf("%s: %s: found %s, want %s; %s", d.Severity, d.Object, d.Found, d.Want, d.Remedy)
}

// Check compares the installation with what this library expects and returns
// what differs: errors first, then warnings, then what CheckLive returns. Nothing
// means that all is well; nothing but SeverityLive, that all is well for those
// who poll. It reads only catalogs and the version, changes nothing, and works
// for every role that Grants writes for. It returns an error only when the
// database cannot be asked.
func Check(ctx context.Context, db Querier, cfg Config) ([]Difference, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	var differences []Difference
	version, err := ReadVersion(ctx, PgxRow(db), cfg.Name)
	switch {
	case errors.Is(err, ErrNotInstalled):
		return []Difference{{
			Severity: SeverityError, Object: fmt.Sprintf("schema %q", cfg.Name),
			Found: "not installed", Want: fmt.Sprintf("version %d", Version),
			Remedy: "run schema.Migrate or the script printed by schema.SQL",
		}}, nil
	case err != nil:
		return nil, err
	case version != Version:
		differences = append(differences, Difference{
			Severity: SeverityError, Object: fmt.Sprintf("schema %q", cfg.Name),
			Found: fmt.Sprintf("version %d", version), Want: fmt.Sprintf("version %d", Version),
			Remedy: (&VersionError{Schema: cfg.Name, Have: version, Want: Version}).Error(),
		})
	}
	found, err := collect(ctx, db, cfg.Name, checkText, cfg.Name)
	if err != nil {
		return nil, err
	}
	live, err := checkLive(ctx, db, cfg.Name)
	if err != nil {
		return nil, err
	}
	return slices.Concat(differences, found, live), nil
}

// CheckLive returns what keeps this session's role from reading the WAL, all of
// it SeverityLive: the server's settings, its free slots and senders, the role,
// the publication. Nothing means that a stream can be opened. It needs what
// Check needs. Where no outbox is installed it returns ErrNotInstalled.
func CheckLive(ctx context.Context, db Querier, cfg Config) ([]Difference, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if _, err := ReadVersion(ctx, PgxRow(db), cfg.Name); err != nil {
		return nil, err
	}
	return checkLive(ctx, db, cfg.Name)
}

func checkLive(ctx context.Context, db Querier, name string) ([]Difference, error) {
	return collect(ctx, db, name, checkLiveText, name, PublicationName(name), createPublication(name))
}

// collect runs one of the texts that return differences.
func collect(ctx context.Context, db Querier, name, text string, args ...any) ([]Difference, error) {
	rows, err := db.Query(ctx, text, args...)
	if err != nil {
		return nil, fmt.Errorf("schema %q: check: %w", name, err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Difference])
	if err != nil {
		return nil, fmt.Errorf("schema %q: check: %w", name, err)
	}
	return found, nil
}

// Errors returns those differences that are errors as one error, or nil.
func Errors(differences []Difference) error {
	var lines []string
	for _, d := range differences {
		if d.Severity == SeverityError {
			lines = append(lines, d.String())
		}
	}
	if len(lines) == 0 {
		return nil
	}
	return errors.New(strings.Join(lines, "\n"))
}
