package pgtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"
)

// cleanupTimeout bounds each step of a test's cleanup.
const cleanupTimeout = 30 * time.Second

// shared is the server of this test binary.
var shared struct {
	mu     sync.Mutex
	server *Server
	err    error
}

// versions are those of the servers that this process has had.
var versions struct {
	mu   sync.Mutex
	seen map[string]bool
}

// noteVersion takes down, and returns, the version of the server at the other end
// of conn.
func noteVersion(conn *pgconn.PgConn) string {
	versions.mu.Lock()
	defer versions.mu.Unlock()
	if versions.seen == nil {
		versions.seen = map[string]bool{}
	}
	version := conn.ParameterStatus("server_version")
	versions.seen[version] = true
	return version
}

func seenVersions() []string {
	versions.mu.Lock()
	defer versions.mu.Unlock()
	return slices.Sorted(maps.Keys(versions.seen))
}

// Main is TestMain's body: it runs the tests, says on which version of PostgreSQL
// they ran, stops the shared server, fails if a goroutine is left running, and
// exits. Each ignored leak deserves a comment
// where it is passed.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
func Main(m *testing.M, ignored ...goleak.Option) {
	useTemplates()
	code := m.Run()
	// Seen with -v, and when a test has failed.
	if versions := seenVersions(); len(versions) > 0 {
		fmt.Fprintln(os.Stderr, "pgtest: on PostgreSQL", strings.Join(versions, " and "))
	}
	if err := errors.Join(stopShared(), removeTemplates()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	// After a failure goroutines may be left because of it, and would only
	// hide it.
	if code == 0 {
		if err := goleak.Find(ignored...); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest: goroutines left after the tests:", err)
			code = 1
		}
	}
	os.Exit(code)
}

func stopShared() error {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.server == nil {
		return nil
	}
	return shared.server.Stop()
}

// Shared returns the server that all tests of the binary share, from Open on
// first use. Main stops it. Tests must not restart it, even if it is Owned:
// others run beside them.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	// A failure is kept: trying again for each test would take minutes.
	if shared.server == nil && shared.err == nil {
		shared.server, shared.err = Open(context.Background(), Options{})
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

// Own starts a throw-away server for this test alone, which may be restarted
// and crashed, and stops it when the test ends. If the test failed it logs the
// end of the server's log.
func Own(t testing.TB, o Options) *Server {
	t.Helper()
	s, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	Cleanup(t, s)
	return s
}

// Cleanup stops s when the test ends, as Own does, for a server that the test
// got in another way.
func Cleanup(t testing.TB, s *Server) {
	t.Cleanup(func() {
		if t.Failed() && s.Owned() && !s.sup.stopped() {
			t.Logf("end of the log of the server on port %d:\n%s", s.Port(), s.sup.logTail(0))
		}
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// Pool returns a pool of connections to url with pgxpool's defaults, and closes
// it when the test ends. A connection that the test has not given back by then
// fails the test.
func Pool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatalf("pgtest: open a pool: %v", err)
	}
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			pool.Close()
		}()
		select {
		case <-closed:
		case <-time.After(cleanupTimeout):
			t.Errorf("pgtest: %d connections were not given back to the pool", pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// FreePort returns a port of 127.0.0.1 on which nobody listens. It is outside
// the range from which outgoing connections take theirs.
func FreePort(t testing.TB) int {
	t.Helper()
	port, err := freePort(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return port
}
