package schema

import (
	_ "embed"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed grants.sql
var grantsText string

// lineBreaks keeps a comment a comment when a name in it has several lines.
var lineBreaks = strings.NewReplacer("\n", "\n-- ", "\r", "\r-- ")

// Roles names the database roles that Grants writes for. They must exist. One
// role may play several parts; an empty name leaves its part out.
type Roles struct {
	// Owner owns the schema and everything in it, and runs Migrate.
	Owner string
	// Publisher writes messages and can do nothing else: not read a payload,
	// and not set the columns from which visibility is computed.
	Publisher string
	// Consumer reads messages and keeps positions. To read the WAL it needs
	// REPLICATION besides; the script has the statement as a comment.
	Consumer string
	// Upkeep maintains partitions and sweeps what is finished.
	Upkeep string
}

// Grants returns the script that gives each role what its part needs and
// nothing more. Run it as the schema's owner (as a superuser if Owner is named
// and is somebody else), after each migration. Running it again changes
// nothing.
func Grants(cfg Config, roles Roles) (string, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return "", err
	}
	sections := map[string]string{
		"all": "-", "owner": roles.Owner, "publisher": roles.Publisher, "consumer": roles.Consumer, "upkeep": roles.Upkeep,
	}
	var b strings.Builder
	b.WriteString("BEGIN;\n")
	for _, part := range strings.Split(grantsText, "-- part: ")[1:] {
		names, text, _ := strings.Cut(part, "\n")
		for _, name := range strings.Fields(names) {
			role, known := sections[name]
			if !known {
				return "", fmt.Errorf("schema: grants.sql has an unknown part %q", name)
			}
			if role == "" {
				continue
			}
			if len(role) > maxIdentifierBytes || strings.ContainsRune(role, 0) {
				return "", fmt.Errorf("schema: the name of the %s role %q is not a valid identifier", name, role)
			}
			b.WriteString("\n-- " + name + "\n" + fill(cfg.Name, text, map[string]string{
				"role":           pgx.Identifier{role}.Sanitize(),
				"role_literal":   quoteLiteral(role),
				"role_commented": lineBreaks.Replace(pgx.Identifier{role}.Sanitize()),
			}))
		}
	}
	b.WriteString("\nCOMMIT;\n")
	return b.String(), nil
}
