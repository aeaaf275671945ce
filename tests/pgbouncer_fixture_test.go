package tests

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/brokertest"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// bouncerProgram is the environment variable that names the program PgBouncer, if
// it is not on PATH.
const bouncerProgram = "OUTBOX_PGBOUNCER"

// bouncer is a PgBouncer in transaction mode, in front of a fixture's server.
type bouncer struct {
	t       testing.TB
	process *brokertest.Process
	through *url.URL // of the fixture's database
}

// newBouncer starts one with so many connections to the server for each pair of
// user and database. It lets in without a password the fixture's user and the
// others named.
func newBouncer(t testing.TB, f *fixture, conns int, users ...string) *bouncer {
	t.Helper()
	program, err := findBouncer()
	require.NoError(t, err)
	server, err := pgx.ParseConfig(f.url)
	require.NoError(t, err)
	through, err := url.Parse(f.url)
	require.NoError(t, err)
	port := pgtest.FreePort(t)
	through.Host = brokertest.Local(port)
	through.User = url.User(server.User)
	through.RawQuery = "sslmode=disable"

	quote := func(text string) string { return `"` + strings.ReplaceAll(text, `"`, `""`) + `"` }
	list := quote(server.User) + " " + quote(server.Password) + "\n"
	for _, user := range users {
		list += quote(user) + ` ""` + "\n"
	}
	config := fmt.Sprintf(`[databases]
* = host=%s port=%d
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = users
pool_mode = transaction
default_pool_size = %d
max_client_conn = 300
stats_users = %s
`, server.Host, server.Port, port, conns, server.User)
	if keepsStatements(t, program) {
		config += "max_prepared_statements = 0\n" // the harder case, and all that older ones have
	}
	if os.Geteuid() == 0 {
		config += "user = nobody\n" // it refuses to run as root
	}
	process, err := brokertest.NewProcess(map[string]string{
		"start.sh":      "exec " + brokertest.Quote(program) + " ./pgbouncer.ini\n",
		"pgbouncer.ini": config,
		"users":         list,
	})
	require.NoError(t, err)
	b := &bouncer{t: t, process: process, through: through}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("end of PgBouncer's log:\n%s", process.LogTail())
		}
		require.NoError(t, process.Close())
	})
	// It looks at the list of users again when it runs as another user.
	require.NoError(t, os.Chmod(process.Folder(), 0o711))
	require.NoError(t, os.Chmod(filepath.Join(process.Folder(), "users"), 0o644))
	b.start()
	return b
}

// findBouncer returns the path of the program.
func findBouncer() (string, error) {
	if named := os.Getenv(bouncerProgram); named != "" {
		path, err := exec.LookPath(named)
		if err != nil {
			return "", fmt.Errorf("%s=%s is no program (unset it to search PATH): %w", bouncerProgram, named, err)
		}
		return path, nil
	}
	// Debian has it where only root's PATH leads.
	return brokertest.Program("pgbouncer", "pgbouncer", bouncerProgram, "/usr/sbin/pgbouncer")
}

// start starts it, at first or after a kill. It is ready when it leads to the
// fixture's database.
func (b *bouncer) start() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), waitFor)
	defer cancel()
	require.NoError(b.t, b.process.Start(ctx, func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, b.through.String())
		if err != nil {
			return err
		}
		return conn.Close(ctx)
	}))
}

// url is the database's address through it, with a query mode of pgx's if there is
// one named.
func (b *bouncer) url(mode string) string {
	if mode == "" {
		return b.through.String()
	}
	return withParameter(b.t, b.through.String(), "default_query_exec_mode", mode)
}

// serverConns returns how many connections to the server there are for the
// fixture's database, as PgBouncer says.
func (b *bouncer) serverConns() int {
	b.t.Helper()
	admin := *b.through
	admin.Path = "/pgbouncer"
	conn, err := pgx.Connect(b.t.Context(), withParameter(b.t, admin.String(), "default_query_exec_mode", "simple_protocol"))
	require.NoError(b.t, err)
	defer func() { require.NoError(b.t, conn.Close(context.WithoutCancel(b.t.Context()))) }()
	rows, err := conn.Query(b.t.Context(), "SHOW POOLS")
	require.NoError(b.t, err)
	defer rows.Close()
	sum := 0
	for rows.Next() {
		values := map[string]string{}
		for i, value := range rows.RawValues() {
			values[rows.FieldDescriptions()[i].Name] = string(value)
		}
		if values["database"] != strings.TrimPrefix(b.through.Path, "/") {
			continue
		}
		for _, column := range []string{"sv_active", "sv_idle", "sv_used", "sv_tested", "sv_login"} {
			n, err := strconv.Atoi(values[column])
			require.NoError(b.t, err, "%v", values)
			sum += n
		}
	}
	require.NoError(b.t, rows.Err())
	return sum
}

var bouncerVersion = regexp.MustCompile(`(\d+)\.(\d+)`)

// keepsStatements reports whether PgBouncer knows of prepared statements: those of
// 1.21 and newer.
func keepsStatements(t testing.TB, program string) bool {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), program, "--version").Output()
	require.NoError(t, err)
	found := bouncerVersion.FindSubmatch(output)
	require.NotNil(t, found, "%s", output)
	major, err := strconv.Atoi(string(found[1]))
	require.NoError(t, err)
	minor, err := strconv.Atoi(string(found[2]))
	require.NoError(t, err)
	return major > 1 || minor >= 21
}
