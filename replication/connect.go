package replication

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

const (
	// DefaultReadBuffer is the default of ConnectOptions.ReadBuffer.
	DefaultReadBuffer = 64 << 10

	// MinReadBuffer is the least ReadBuffer: what the server sends at once.
	MinReadBuffer = 8 << 10

	// MaxReadBuffer is the most ReadBuffer.
	MaxReadBuffer = 64 << 20
)

// ConnectOptions say how a replication connection differs from an ordinary one.
// The zero value is fine.
type ConnectOptions struct {
	// Settings are run-time parameters of the session, such as
	// {"lock_timeout": "2s"}. They are sent with the connection's start, win
	// over those of the configuration, and a wrong one makes Connect fail.
	// Defaults to UTF-8 and the styles in which values in text format can be
	// read by a program: see sessionDefaults. A pooler that does not know a
	// parameter refuses the connection.
	Settings map[string]string

	// ApplicationName is how the session shows in pg_stat_activity and
	// pg_stat_replication. Defaults to the configuration's, or else to
	// "replication".
	ApplicationName string

	// ReadBuffer is how many bytes are read from the connection at once, at
	// most, between MinReadBuffer and MaxReadBuffer. Too low costs system calls
	// when much comes in; too high costs memory only. Defaults to
	// DefaultReadBuffer.
	ReadBuffer int
}

// sessionDefaults are the parameters of a session for which neither the
// configuration nor the caller says something else: with them the text of
// values does not depend on the role's or the database's own defaults.
var sessionDefaults = map[string]string{
	"client_encoding":    "UTF8",
	"datestyle":          "ISO",
	"intervalstyle":      "postgres",
	"extra_float_digits": "3",
}

// clientParameters are settings of other parts of pgx that a connection string
// may have in it. A server does not know them.
var clientParameters = []string{
	"default_query_exec_mode", "statement_cache_capacity", "description_cache_capacity",
	"pool_max_conns", "pool_min_conns", "pool_min_idle_conns", "pool_max_conn_lifetime",
	"pool_max_conn_lifetime_jitter", "pool_max_conn_idle_time", "pool_health_check_period", "pool_ping_timeout",
}

// Conn is a replication connection to one database. It runs the commands of the
// replication protocol and simple SQL, until a stream takes it over.
//
// It is not safe for concurrent use. A context that ends during a command closes
// the connection, and on the server interrupts the command.
type Conn struct {
	pg    *pgconn.PgConn
	in    *bufio.Reader // between the socket and pg's frontend
	taken bool
}

// Connect opens a replication connection with the configuration of ordinary
// ones, as it comes from pgconn.ParseConfig or is part of pgx's and pgxpool's
// configurations: same addresses and fall-backs, TLS, authentication, hooks. The
// configuration is copied. An AfterConnect hook can use the simple protocol
// only.
//
// ctx governs the attempt; see also ConnectTimeout of the configuration. The
// caller closes the connection, or hands it to a stream.
func Connect(ctx context.Context, config *pgconn.Config, options ConnectOptions) (*Conn, error) {
	if options.ReadBuffer == 0 {
		options.ReadBuffer = DefaultReadBuffer
	}
	if options.ReadBuffer < MinReadBuffer || options.ReadBuffer > MaxReadBuffer {
		return nil, fmt.Errorf("replication: ReadBuffer is %d, it must be between %d and %d", options.ReadBuffer, MinReadBuffer, MaxReadBuffer)
	}
	config = config.Copy()
	config.RuntimeParams = sessionParameters(config.RuntimeParams, options)

	conn := &Conn{}
	build := config.BuildFrontend
	// Attempts follow one another, so the last reader is that of the
	// connection which is returned.
	config.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		conn.in = bufio.NewReaderSize(r, options.ReadBuffer)
		return build(conn.in, w)
	}
	pg, err := pgconn.ConnectConfig(ctx, config)
	if err != nil {
		return nil, wrap("connect", "", aboutConnection, err)
	}
	conn.pg = pg
	return conn, nil
}

// sessionParameters returns what is sent with the connection's start.
func sessionParameters(configured map[string]string, options ConnectOptions) map[string]string {
	params := map[string]string{}
	// PostgreSQL does not care for the case of their names.
	add := func(from map[string]string) {
		for name, value := range from {
			params[strings.ToLower(name)] = value
		}
	}
	add(sessionDefaults)
	add(configured)
	for _, name := range clientParameters {
		delete(params, name)
	}
	add(options.Settings)
	if options.ApplicationName != "" {
		params["application_name"] = options.ApplicationName
	}
	if params["application_name"] == "" {
		params["application_name"] = "replication"
	}
	params["replication"] = "database"
	return params
}

// PID returns the process that serves the connection, as in pg_stat_replication.
func (c *Conn) PID() uint32 { return c.pg.PID() }

// ServerVersion returns the server's major version, such as 17, or 0 if it is
// not known.
func (c *Conn) ServerVersion() int {
	text := c.pg.ParameterStatus("server_version")
	end := strings.IndexFunc(text, func(r rune) bool { return r < '0' || r > '9' })
	if end >= 0 {
		text = text[:end]
	}
	version, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return version
}

// Setting returns the value of a run-time parameter in this session, as SHOW
// does.
func (c *Conn) Setting(ctx context.Context, name string) (string, error) {
	rows, err := c.query(ctx, "SELECT pg_catalog.current_setting("+quoteLiteral(name)+")")
	if err != nil {
		return "", wrap("show setting", name, aboutConnection, err)
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return "", &Error{Op: "show setting", Name: name, Reason: ErrProtocol}
	}
	return rows[0][0], nil
}

// Close closes the connection; a temporary slot goes with it. ctx bounds the
// goodbye. It may be called twice. On a connection that a stream has taken it
// does nothing: close the stream.
func (c *Conn) Close(ctx context.Context) error {
	if c.taken {
		return nil
	}
	// pgx closes a connection whose context has ended in the background.
	err := c.pg.Close(ctx)
	select {
	case <-c.pg.CleanupDone():
		return err
	case <-ctx.Done():
		return errors.Join(err, context.Cause(ctx))
	}
}

// query runs SQL by the simple protocol, the only one there is here, and
// returns the rows of its last statement. NULL becomes "".
func (c *Conn) query(ctx context.Context, sql string) ([][]string, error) {
	if c.taken {
		return nil, ErrConnTaken
	}
	results, err := c.pg.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) == 0 {
		return nil, nil
	}
	last := results[len(results)-1]
	rows := make([][]string, len(last.Rows))
	for i, row := range last.Rows {
		rows[i] = make([]string, len(row))
		for j, value := range row {
			rows[i][j] = string(value)
		}
	}
	return rows, nil
}

// quoteLiteral writes text as a literal that means the same whatever
// standard_conforming_strings is.
func quoteLiteral(text string) string {
	return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `''`).Replace(text) + "'"
}
