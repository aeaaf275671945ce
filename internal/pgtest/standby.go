package pgtest

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
)

// Standby returns a new throw-away server that is a hot standby of s, by way of
// pg_basebackup, and streams from it. It starts with the settings of s
// overridden by o, and its life is its own: it is ended by its own Stop, and
// neither server's end ends the other. ctx governs the copy and the start;
// without a deadline it gets one of 2 minutes.
//
// Downloaded programs lack pg_basebackup; then it returns an error that says so.
func (s *Server) Standby(ctx context.Context, o Options) (*Server, error) {
	if !s.Owned() {
		return nil, ErrNotOwned
	}
	s.mu.Lock()
	settings := maps.Clone(s.settings)
	s.mu.Unlock()
	if o.Durable {
		settings["fsync"] = "on"
	}
	settings, err := mergeSettings(settings, o.Settings)
	if err != nil {
		return nil, err
	}
	bin := s.sup.bin
	if _, err := os.Stat(filepath.Join(bin, "pg_basebackup")); err != nil {
		return nil, fmt.Errorf("pgtest: a standby needs pg_basebackup (install PostgreSQL's server and client packages): %w", err)
	}
	copyPrimary := func(ctx context.Context, sup *supervisor) error {
		return sup.run(ctx, "pg_basebackup", "--pgdata=data", "--write-recovery-conf", "--wal-method=stream",
			"--checkpoint=fast", "--no-sync", "--dbname="+s.URL())
	}
	return create(ctx, bin, settings, copyPrimary, freePort)
}
