package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// mutation weakens one mechanism; the test named must then fail.
type mutation struct {
	name string
	// file, find and replace say where and how, from the library's root.
	file          string
	find, replace []string
	test          string
	env           []string
	// says is in the output of the failing test.
	says string
}

var mutations = []mutation{
	{
		name: "late rows only of transactions in xip",
		file: "internal/window/queries/open.sql",
		find: []string{"WHERE b.low < b.high AND $4::bigint > 0"}, replace: []string{"WHERE false AND $4::bigint > 0"},
		test: "TestWindowsAgainstModel", says: "rows lost",
	},
	{
		name: "late rows only of transactions above xmax",
		file: "internal/window/queries/open.sql",
		find: []string{"WHERE pg_visible_in_snapshot(x, now.c)\n"}, replace: []string{"WHERE false\n"},
		test: "TestWindowsAgainstModel", says: "rows lost",
	},
	{
		name: "rows in the order of transaction ids",
		file: "internal/window/queries/open.sql",
		find: []string{
			"SELECT m.id, m.key, m.uuid,", "ORDER BY m.id LIMIT", "ORDER BY r.id LIMIT", "ORDER BY r.step, r.id ROWS", "ORDER BY 1, 2",
		},
		replace: []string{
			"SELECT m.xid AS order_xid, m.id, m.key, m.uuid,", "ORDER BY m.xid, m.id LIMIT", "ORDER BY r.order_xid, r.id LIMIT",
			"ORDER BY r.step, r.order_xid, r.id ROWS", "ORDER BY 1",
		},
		test: "TestCausalDelivery", says: "out_of_order=",
	},
	{
		name: "the life of the server is not checked",
		file: "subscription.go",
		find: []string{"case page.Life != held.Life:"}, replace: []string{"case page.Life.Era != held.Life.Era:"},
		test: "TestServerCrash", says: "FAIL",
	},
}

// TestMutations copies the library, weakens one mechanism at a time and runs the
// test that guards it, which must fail: a test that never failed proves nothing.
func TestMutations(t *testing.T) {
	t.Parallel()

	root, err := filepath.Abs("..")
	require.NoError(t, err)
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			folder := t.TempDir()
			copyLibrary(t, root, folder)
			m.apply(t, folder)
			command := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-run", "^"+m.test+"$", "./tests")
			command.Dir = folder
			command.Env = append(append(os.Environ(), "GOFLAGS=-buildvcs=false", "GOWORK="+filepath.Join(folder, "go.work")), m.env...)
			output, err := command.CombinedOutput()
			require.Error(t, err, "%s passed although %s:\n%s", m.test, m.name, output)
			require.NotContains(t, string(output), "[build failed]")
			require.NotContains(t, string(output), "[setup failed]")
			require.Contains(t, string(output), m.says)
			require.Contains(t, string(output), "--- FAIL: "+m.test)
			t.Logf("%s failed, as it must", m.test)
		})
	}
}

func (m mutation) apply(t *testing.T, folder string) {
	t.Helper()
	path := filepath.Join(folder, m.file)
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	text := string(content)
	for i, find := range m.find {
		require.Contains(t, text, find, "the mutation no longer fits %s", m.file)
		text = strings.ReplaceAll(text, find, m.replace[i])
	}
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

// copyLibrary copies what the tests need: the library, its test helpers, and the
// tests.
func copyLibrary(t *testing.T, root, folder string) {
	t.Helper()
	for _, name := range []string{"internal", "schema", "tests"} {
		require.NoError(t, os.CopyFS(filepath.Join(folder, name), os.DirFS(filepath.Join(root, name))))
	}
	sources, err := filepath.Glob(filepath.Join(root, "*.go"))
	require.NoError(t, err)
	for _, path := range append(sources, filepath.Join(root, "go.mod"), filepath.Join(root, "go.sum")) {
		content, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(folder, filepath.Base(path)), content, 0o600))
	}
	work := "go 1.25.0\n\nuse (\n\t.\n\t./internal/pgtest\n\t./tests\n)\n"
	require.NoError(t, os.WriteFile(filepath.Join(folder, "go.work"), []byte(work), 0o600))
}
