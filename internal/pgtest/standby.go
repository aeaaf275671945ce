package pgtest

import (
	"context"
	"maps"
)

// Standby returns a new throw-away server that is a hot standby of s, made from a
// copy of its data, and streams from it. It starts with the settings of s
// overridden by o, and its life is its own: it is ended by its own Stop, and
// neither server's end ends the other. ctx governs the copy and the start;
// without a deadline it gets one of 2 minutes.
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
	return create(ctx, s.sup.bin, settings, s.backup, freePort)
}
