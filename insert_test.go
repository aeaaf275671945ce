package outbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/record"
)

// Everything that means something in an array: an element of it once became two
// elements, or none, in libraries that joined strings.
var arrayElements = []string{
	"", "a", "NULL", "null", " ", " a ", "\t\n\r\v\f", `"`, `""`, `\`, `\\`, `\"`, `"\`, ",", "a,b", "{", "}", "{}", `{"a"}`, "'", "é", "值", "🙂",
	`\x00`, "\x01\x1f\x7f",
}

// readTextArray reads an array as a PostgreSQL client does.
func readTextArray(t testing.TB, types *pgtype.Map, literal string) []*string {
	t.Helper()
	var list []*string
	require.NoError(t, types.Scan(pgtype.TextArrayOID, pgtype.TextFormatCode, []byte(literal), &list), "%q", literal)
	return list
}

func readByteaArray(t testing.TB, types *pgtype.Map, literal string) [][]byte {
	t.Helper()
	var list [][]byte
	require.NoError(t, types.Scan(pgtype.ByteaArrayOID, pgtype.TextFormatCode, []byte(literal), &list), "%q", literal)
	return list
}

func TestArrayLiteral(t *testing.T) {
	t.Parallel()

	types := pgtype.NewMap()
	var text, bytes arrayLiteral
	require.Equal(t, "{}", text.String())
	want := []*string{nil}
	wantBytes := [][]byte{nil, {}, {0}, {0xff, 0xfe}}
	for i := range arrayElements {
		want = append(want, &arrayElements[i], nil)
		wantBytes = append(wantBytes, []byte(arrayElements[i]))
	}
	for _, element := range want {
		text.appendText(element)
	}
	for _, element := range wantBytes {
		bytes.appendBytes(element)
	}
	require.Equal(t, want, readTextArray(t, types, text.String()))
	require.Equal(t, wantBytes, readByteaArray(t, types, bytes.String()))
	require.Equal(t, text.String(), text.String(), "reading it does not change it")
}

// fakeStd keeps the arguments of the last statement.
type fakeStd struct{ args []any }

func (f *fakeStd) ExecContext(_ context.Context, _ string, args ...any) (sql.Result, error) {
	f.args = args
	return driver.RowsAffected(1), nil
}

// Versions of lib/pq store a nil []byte as one without bytes; only a plain nil
// is NULL to all.
func TestInsertThroughDatabaseSQLSendsNullAsNil(t *testing.T) {
	t.Parallel()

	var std fakeStd
	db, err := newExecutor(&std)
	require.NoError(t, err)
	text := newInsertText("outbox")
	require.NoError(t, text.insert(t.Context(), db, []record.Record{{Metadata: "{}"}}))
	require.Len(t, std.args, 5)
	require.True(t, std.args[4] == nil, "%#v", std.args[4])
	require.NoError(t, text.insert(t.Context(), db, []record.Record{{Metadata: "{}", Payload: []byte{}}}))
	require.Equal(t, []byte{}, std.args[4])
}

// Arrays carry so much and no more, except that one message always goes.
func TestCheckArrayBytes(t *testing.T) {
	t.Parallel()

	half := make([]byte, maxArrayBytes/2)
	require.NoError(t, checkArrayBytes([]record.Record{{Payload: half}, {Payload: half}}))
	require.ErrorIs(t, checkArrayBytes([]record.Record{{Payload: half}, {Payload: half, Metadata: "{}"}}), ErrCallTooLarge)
	require.NoError(t, checkArrayBytes([]record.Record{{Payload: make([]byte, maxArrayBytes), Metadata: "{}"}}))
}

// FuzzArrayLiteral writes arrays and reads them back with pgx.
func FuzzArrayLiteral(f *testing.F) {
	for i, a := range arrayElements {
		f.Add(a, arrayElements[(i+1)%len(arrayElements)], []byte(a), i%2 == 0)
	}
	types := pgtype.NewMap()
	f.Fuzz(func(t *testing.T, a, b string, c []byte, null bool) {
		if textProblem(a, 1<<30) != "" || textProblem(b, 1<<30) != "" {
			return // refused before it comes to that
		}
		var text, bytes arrayLiteral
		want := []*string{&a, &b, &a}
		wantBytes := [][]byte{c, []byte(a), {}}
		if null {
			want = append(want, nil, &b)
			wantBytes = append(wantBytes, nil, c)
		}
		for _, element := range want {
			text.appendText(element)
		}
		for _, element := range wantBytes {
			bytes.appendBytes(element)
		}
		require.Equal(t, want, readTextArray(t, types, text.String()))
		got := readByteaArray(t, types, bytes.String())
		require.Len(t, got, len(wantBytes))
		for i := range wantBytes {
			require.Equal(t, wantBytes[i] == nil, got[i] == nil)
			require.Equal(t, string(wantBytes[i]), string(got[i]))
		}
	})
}
