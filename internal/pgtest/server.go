package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// EnvDatabaseURL is the environment variable that names a server to use
	// instead of a throw-away one, as a postgres:// URL. Its role must be allowed to
	// create databases and, for tests of replication, to replicate.
	EnvDatabaseURL = "OUTBOX_DATABASE_URL"

	// startTimeout bounds a start whose context has no deadline.
	startTimeout = 2 * time.Minute

	// readyInterval is the pause between two attempts to connect to a server
	// that is starting.
	readyInterval = 20 * time.Millisecond

	// portAttempts is how many ports a new server tries.
	portAttempts = 5

	configFile = "pgtest.conf"
)

// Server is a PostgreSQL server: a throw-away one, or one that belongs to
// somebody else (see Owned).
//
// All methods may be called concurrently. Shutdown, StartAgain, Restart, Kill
// and Reconfigure take turns; Stop does not wait for its turn.
type Server struct {
	url *url.URL // of the database "postgres", or as given in the environment

	sup *supervisor // nil if the server is not ours

	version atomic.Value // string, as the server says it

	mu       sync.Mutex // one change of state at a time; guards what follows
	settings map[string]string
	port     int
	name     string // cluster_name, to know the server by
}

// Open returns a server: the one named by OUTBOX_DATABASE_URL, or else a new
// throw-away one as from Start. ctx governs the search and the start, not the
// server's life; without a deadline it gets one of 2 minutes. The caller calls
// Stop in either case.
//
// Options apply to a throw-away server only.
func Open(ctx context.Context, o Options) (*Server, error) {
	given := os.Getenv(EnvDatabaseURL)
	if given == "" {
		return Start(ctx, o)
	}
	u, err := serverURL(given)
	if err != nil {
		return nil, err
	}
	major, err := wantedMajor(os.Getenv(EnvPostgresVersion))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	conn, err := pgconn.Connect(ctx, given)
	if err != nil {
		return nil, fmt.Errorf("pgtest: the server named by %s does not answer (unset it to get a throw-away one): %w", EnvDatabaseURL, err)
	}
	found, version := majorVersion(conn), noteVersion(conn)
	if err := conn.Close(ctx); err != nil {
		return nil, fmt.Errorf("pgtest: close the connection to the server named by %s: %w", EnvDatabaseURL, err)
	}
	if major != 0 && found != major {
		return nil, fmt.Errorf("pgtest: the server named by %s is a PostgreSQL %d, but %s is %d: unset one of them", EnvDatabaseURL, found, EnvPostgresVersion, major)
	}
	s := &Server{url: u}
	s.version.Store(version)
	return s, nil
}

// serverURL parses the value of EnvDatabaseURL. Its errors do not repeat it, as
// url.Parse's do: it may hold a password.
func serverURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || (u.Scheme != "postgres" && u.Scheme != "postgresql") {
		return nil, fmt.Errorf("pgtest: %s is not a URL of a PostgreSQL server; it should look like postgres://user:password@host:5432/database", EnvDatabaseURL)
	}
	return u, nil
}

// Start returns a new throw-away server that is ready for connections. ctx
// governs the search for its programs and the start, not the server's life;
// without a deadline it gets one of 2 minutes.
//
// The caller ends the server with Stop. If the process ends without it, in
// whatever way, the server ends too and its folder is removed.
func Start(ctx context.Context, o Options) (*Server, error) {
	return startWith(ctx, defaultFinder(), o)
}

// startWith is Start with the programs that f finds.
func startWith(ctx context.Context, f finder, o Options) (*Server, error) {
	settings, err := o.settings()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	bin, err := f.findWith(ctx, o.Programs)
	if err != nil {
		return nil, err
	}
	return create(ctx, bin, settings, newCluster, freePort)
}

// initialise fills the data folder of a new cluster by initdb.
func initialise(ctx context.Context, sup *supervisor) error {
	return sup.run(ctx, "initdb", "--pgdata=data", "--username=postgres", "--auth=trust",
		"--encoding=UTF8", "--locale=C", "--no-sync")
}

// create makes a server with the programs in bin, a data folder filled by fill,
// and a port chosen by choosePort, and starts it.
func create(
	ctx context.Context,
	bin string,
	settings map[string]string,
	fill func(context.Context, *supervisor) error,
	choosePort func(context.Context) (int, error),
) (_ *Server, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	u, err := unprivileged()
	if err != nil {
		return nil, err
	}
	sup, err := supervise(ctx, bin, parentFolder(settings["fsync"] != "off"), u)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, sup.close())
		}
	}()

	s := &Server{sup: sup, settings: settings, name: "pgtest-" + strings.ToLower(rand.Text()[:12])}
	if err := fill(ctx, sup); err != nil {
		return nil, err
	}
	if err := s.include(); err != nil {
		return nil, err
	}
	for attempt := 1; ; attempt++ {
		if s.port, err = choosePort(ctx); err != nil {
			return nil, err
		}
		s.url = &url.URL{
			Scheme:   "postgres",
			User:     url.User("postgres"),
			Host:     "127.0.0.1:" + strconv.Itoa(s.port),
			Path:     "/postgres",
			RawQuery: "sslmode=disable",
		}
		if err := s.configure(s.settings); err != nil {
			return nil, err
		}
		err := s.start(ctx)
		if err == nil {
			return s, nil
		}
		if !errors.Is(err, errPortTaken) || attempt == portAttempts {
			return nil, err
		}
	}
}

// URL returns the URL of the server's database "postgres", or of the one named
// in OUTBOX_DATABASE_URL.
func (s *Server) URL() string { return s.url.String() }

// URLFor returns the URL of a database on the server, which need not exist.
func (s *Server) URLFor(database string) string {
	u := *s.url
	u.Path = "/" + database
	u.RawPath = ""
	return u.String()
}

// Owned reports whether the server is a throw-away one, which may be stopped,
// restarted and crashed.
func (s *Server) Owned() bool { return s.sup != nil }

// DataDir returns the server's data folder, which Stop removes. It is empty if
// the server is not Owned.
func (s *Server) DataDir() string {
	if !s.Owned() {
		return ""
	}
	return filepath.Join(s.sup.folder, "data")
}

// LogFile returns the path of the server's log, which Stop removes. It is empty
// if the server is not Owned.
func (s *Server) LogFile() string {
	if !s.Owned() {
		return ""
	}
	return s.sup.logFile()
}

// Port returns the port on which the server listens, 5432 if the URL has none.
func (s *Server) Port() int {
	port, err := strconv.Atoi(s.url.Port())
	if err != nil {
		return 5432
	}
	return port
}

// Version returns the server's version as it says it itself, such as "18.4" or
// "15.20 (Debian 15.20-0+deb12u1)".
func (s *Server) Version() string {
	version, _ := s.version.Load().(string)
	return version
}

// Addr returns where the server listens, as "host:port".
func (s *Server) Addr() string {
	return net.JoinHostPort(s.url.Hostname(), strconv.Itoa(s.Port()))
}

// Stop throws the server away: its processes end without a checkpoint, and its
// folder is removed. It returns when both have happened, within 30 s, and wakes
// any other method that waits. It may be called more than once, and does
// nothing if the server is not Owned.
func (s *Server) Stop() error {
	if !s.Owned() {
		return nil
	}
	return s.sup.close()
}

// include makes the server read configFile after what initdb wrote.
func (s *Server) include() error {
	path := filepath.Join(s.DataDir(), "postgresql.conf")
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("pgtest: read the server's configuration: %w", err)
	}
	line := "include '" + configFile + "'\n"
	if strings.HasSuffix(string(text), line) {
		return nil // copied from a server of ours
	}
	if err := os.WriteFile(path, append(text, "\n"+line...), 0o600); err != nil {
		return fmt.Errorf("pgtest: write the server's configuration: %w", err)
	}
	return nil
}

// configure writes the configuration with which the server starts next.
func (s *Server) configure(settings map[string]string) error {
	text := renderSettings(settings) + renderSettings(map[string]string{
		"cluster_name":            s.name,
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(s.port),
		"unix_socket_directories": "",
	})
	// Written by root and read by another user: safe, since only that user and
	// root can enter the folder.
	if err := os.WriteFile(filepath.Join(s.DataDir(), configFile), []byte(text), 0o644); err != nil {
		return fmt.Errorf("pgtest: write the server's configuration: %w", err)
	}
	return nil
}

// start starts the postmaster and waits until it lets clients in. If it fails
// the server is down.
func (s *Server) start(ctx context.Context) error {
	logged := s.sup.logSize()
	p, err := s.sup.start()
	if err != nil {
		return err
	}
	// Whoever else holds the port may accept a connection and say nothing.
	alive, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-p.gone:
			cancel()
		case <-alive.Done():
		}
	}()
	var last error
	for {
		if last = s.probe(alive); last == nil {
			return nil
		}
		select {
		case <-p.gone:
			if s.sup.stopped() {
				return ErrStopped
			}
			tail := s.sup.logTail(logged)
			if strings.Contains(tail, "could not create any TCP/IP sockets") {
				return fmt.Errorf("pgtest: start the server on port %d: %w:\n%s", s.port, errPortTaken, tail)
			}
			return fmt.Errorf("pgtest: the server ended with exit code %d while starting:\n%s", p.code, tail)
		case <-ctx.Done():
			tail := s.sup.logTail(logged)
			// Nobody would expect a server that comes up later. A gentler signal
			// could be lost this early, see supervisor.sh.
			if p.signal(syscall.SIGKILL) == nil {
				<-p.gone
			}
			return fmt.Errorf("pgtest: the server is not ready for connections (%w, last attempt: %w):\n%s", context.Cause(ctx), last, tail)
		case <-time.After(readyInterval):
		}
	}
}

// probe reports whether this very server lets clients in. Another one may hold
// the port, so it asks for the name.
func (s *Server) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	conn, err := pgconn.Connect(ctx, s.URL())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	s.version.Store(noteVersion(conn))
	results, err := conn.Exec(ctx, "SHOW cluster_name").ReadAll()
	if err != nil {
		return err
	}
	if name := string(results[0].Rows[0][0]); name != s.name {
		return fmt.Errorf("another server (%q) listens on port %d", name, s.port)
	}
	return nil
}
