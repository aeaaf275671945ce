package schema

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestText(t *testing.T) {
	t.Parallel()

	for _, test := range []struct{ name, text, want string }{
		{"outbox", "SELECT outbox.era()", `SELECT "outbox".era()`},
		{`My "odd" Schema`, "SELECT outbox.a FROM outbox.b", `SELECT "My ""odd"" Schema".a FROM "My ""odd"" Schema".b`},
		{"x", "GRANT USAGE ON SCHEMA outbox TO a", `GRANT USAGE ON SCHEMA "x" TO a`},
		{"x", "the outbox: myoutbox.a outbox_a SCHEMA outboxes outbox", "the outbox: myoutbox.a outbox_a SCHEMA outboxes outbox"},
		{"x", "SELECT $1::outbox.t, a::text, 'b:c', '12:34'", `SELECT $1::"x".t, a::text, 'b:c', '12:34'`},
		{"x", "AS $body$ outbox.a $body$", `AS $body$ "x".a $body$`},
		{"$body$", "AS $body$ outbox.a $body$", `AS $body_$ "$body$".a $body_$`},
		{"$body_$ $body$", "AS $body$ outbox.a $body$", `AS $body__$ "$body_$ $body$".a $body__$`},
		{"it's", "n = :schema", "n = 'it''s'"},
		{`a\'b`, "n = :schema", `n =  E'a\\''b'`},
		{":schema", "n = :schema, outbox.a", `n = ':schema', ":schema".a`},
		{"outbox.", "outbox.a", `"outbox.".a`},
	} {
		require.Equal(t, test.want, Text(test.name, test.text))
	}
}

// What was put in is not read again: a value may look like a place.
func TestFillReadsEachPlaceOnce(t *testing.T) {
	t.Parallel()

	values := map[string]string{"a": ":b outbox. $body$ :schema", "b": ":a"}
	require.Equal(t, `:b outbox. $body$ :schema|:a|:c|a::b|:ab`, fill("x", ":a|:b|:c|a::b|:ab", values))
}

// FuzzText tries to break out of the quotes.
func FuzzText(f *testing.F) {
	for _, name := range []string{"outbox", `"`, `""`, "'", `\`, "$body$", "$body_$$body$", ":schema", "outbox.", "SCHEMA outbox", "a.b", "é"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if ValidateName(name) != nil {
			return
		}
		text := Text(name, "A outbox.t B :schema C $body$ outbox.u $body$ D SCHEMA outbox E")
		identifier := pgx.Identifier{name}.Sanitize()
		rest, ok := strings.CutPrefix(text, "A "+identifier+".t B ")
		require.True(t, ok, text)
		rest, ok = strings.CutPrefix(rest, quoteLiteral(name)+" C ")
		require.True(t, ok, text)
		rest, ok = strings.CutSuffix(rest, " D SCHEMA "+identifier+" E")
		require.True(t, ok, text)
		// A body is what stands between its delimiter and the next one.
		delimiter, _, ok := strings.Cut(rest[1:], "$")
		require.True(t, ok, text)
		delimiter = "$" + delimiter + "$"
		require.Equal(t, delimiter+" "+identifier+".u "+delimiter, rest)
		require.Equal(t, 2, strings.Count(rest, delimiter), text)

		// A literal ends where it should, with either meaning of a backslash.
		for _, escapes := range []bool{false, true} {
			require.Equal(t, name, readLiteral(t, quoteLiteral(name), escapes))
		}
	})
}

// readLiteral reads a string constant as the server does; escapes says whether a
// backslash in a plain one means something (standard_conforming_strings=off).
func readLiteral(t testing.TB, literal string, escapes bool) string {
	t.Helper()
	literal, extended := strings.CutPrefix(literal, " E")
	escapes = escapes || extended
	require.True(t, strings.HasPrefix(literal, "'"), literal)
	var value strings.Builder
	for i := 1; i < len(literal); i++ {
		switch c := literal[i]; {
		case c == '\'' && i+1 < len(literal) && literal[i+1] == '\'', c == '\\' && escapes && i+1 < len(literal):
			i++
			value.WriteByte(literal[i])
		case c == '\'':
			require.Equal(t, len(literal)-1, i, "%s ends early", literal)
			return value.String()
		default:
			value.WriteByte(c)
		}
	}
	require.FailNow(t, "no end", literal)
	return ""
}
