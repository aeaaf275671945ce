package schema

import (
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
)

// places finds what is filled in: the schema's name as a prefix and after the
// word SCHEMA, the delimiter of function bodies, and the values. A cast (::)
// is matched only to be left alone.
var places = regexp.MustCompile(`::|\boutbox\.|\bSCHEMA outbox\b|\$body\$|:[a-z_]+\b`)

// Text returns an SQL text written for the schema "outbox" as the text for the
// schema called name: each prefix "outbox." becomes the quoted name, and the
// delimiter $body$ one that does not occur in it. The text must not have the
// prefix inside a string literal or a comment, where a quoted identifier would
// be wrong.
func Text(name, text string) string {
	return fill(name, text, nil)
}

// fill is Text that also puts in values, written :like_this; :schema is the
// name as a literal. One pass, so that nothing that was put in is read again.
func fill(name, text string, values map[string]string) string {
	delimiter := "body"
	for strings.Contains(name, "$"+delimiter+"$") {
		delimiter += "_"
	}
	quoted := pgx.Identifier{name}.Sanitize()
	return places.ReplaceAllStringFunc(text, func(place string) string {
		switch place {
		case "outbox.":
			return quoted + "."
		case "SCHEMA outbox":
			return "SCHEMA " + quoted
		case "$body$":
			return "$" + delimiter + "$"
		case ":schema":
			return quoteLiteral(name)
		}
		if value, ok := values[strings.TrimPrefix(place, ":")]; ok {
			return value
		}
		return place
	})
}

// quoteLiteral returns s as an SQL string constant that means the same under
// either setting of standard_conforming_strings.
func quoteLiteral(s string) string {
	quoted := "'" + strings.ReplaceAll(s, "'", "''") + "'"
	if strings.Contains(s, `\`) {
		return " E" + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}
