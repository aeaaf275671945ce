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
	name  string
	edits []edit
	test  string
	// says is in the output of the failing test.
	says string
}

// edit replaces a text wherever it stands in a file, named from the library's
// root.
type edit struct{ file, find, replace string }

const openQuery = "internal/window/queries/open.sql"

var mutations = []mutation{
	{
		name:  "late rows only of transactions in xip",
		edits: []edit{{openQuery, "WHERE b.low < b.high AND $4::bigint > 0", "WHERE false AND $4::bigint > 0"}},
		test:  "TestWindowsAgainstModel", says: "rows lost",
	},
	{
		name:  "late rows only of transactions above xmax",
		edits: []edit{{openQuery, "WHERE pg_visible_in_snapshot(x, now.c)\n", "WHERE false\n"}},
		test:  "TestWindowsAgainstModel", says: "rows lost",
	},
	{
		name: "rows in the order of transaction ids",
		edits: []edit{
			{openQuery, "SELECT m.id, m.key, m.uuid,", "SELECT m.xid AS order_xid, m.id, m.key, m.uuid,"},
			{openQuery, "ORDER BY m.id LIMIT", "ORDER BY m.xid, m.id LIMIT"},
			{openQuery, "ORDER BY r.id LIMIT", "ORDER BY r.order_xid, r.id LIMIT"},
			{"internal/window/reader.go", "if len(page.Rows) > 0 && !head.last.before(l.row) {", "if false {"},
		},
		test: "TestCausalDelivery", says: "out_of_order=",
	},
	{
		// It is checked in depth: by the reader, the beat, each write, and by
		// comparing snapshots.
		name: "the life of the server is not checked",
		edits: []edit{
			{"reading.go", "case page.Life != r.held.Life:", "case page.Life.Era != r.held.Life.Era:"},
			{"internal/window/reader.go", "if !c.Covers(pos.P) {", "if false {"},
			{"internal/lease/lease.go", "case holding.Life != lease.Life:", "case holding.Life.Era != lease.Life.Era:"},
			{"internal/watch/watch.go", "before.Life != now.Life || !now.Snapshot.Covers(before.Snapshot)", "false"},
			{"internal/cursor/queries/save.sql", "AND v.life = (SELECT b.life::text FROM outbox.boot b)", "AND v.life <> ''"},
			{"internal/cursor/queries/save.sql", "AND (v.era <> outbox.era() OR pg_snapshot_xmax(coalesce(v.c, v.p)::pg_snapshot) <= pg_snapshot_xmax(pg_current_snapshot()))", ""},
		},
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
			command.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false", "GOWORK="+filepath.Join(folder, "go.work"))
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
	for _, e := range m.edits {
		path := filepath.Join(folder, e.file)
		content, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Contains(t, string(content), e.find, "the mutation no longer fits %s", e.file)
		mutated := strings.ReplaceAll(string(content), e.find, e.replace)
		require.NoError(t, os.WriteFile(path, []byte(mutated), 0o600))
	}
}

// copyLibrary copies the modules of the workspace, since it names them all.
func copyLibrary(t *testing.T, root, folder string) {
	t.Helper()
	for _, name := range []string{"bench", "examples", "forwarder", "internal", "replication", "schema", "tests"} {
		require.NoError(t, os.CopyFS(filepath.Join(folder, name), os.DirFS(filepath.Join(root, name))))
	}
	sources, err := filepath.Glob(filepath.Join(root, "*.go"))
	require.NoError(t, err)
	for _, name := range []string{"go.mod", "go.sum", "go.work", "go.work.sum"} {
		sources = append(sources, filepath.Join(root, name))
	}
	for _, path := range sources {
		content, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(folder, filepath.Base(path)), content, 0o600))
	}
}
