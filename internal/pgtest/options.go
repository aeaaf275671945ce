package pgtest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Options says how a throw-away server differs from the default one. The zero
// value is fine. A server named by OUTBOX_DATABASE_URL is taken as it is.
type Options struct {
	// Settings are added to the server's configuration file and win over the
	// defaults below, for example {"max_replication_slots": "5"}. Values are
	// written as in postgresql.conf, without quotes. Settings on which this
	// package itself depends (see reserved) are refused. Defaults to none.
	Settings map[string]string

	// Durable keeps fsync on: what was committed survives a crash of the
	// machine, and commits cost what they cost in production. Benchmarks want
	// it. A crash of the server alone (Kill, Immediate) loses nothing either
	// way. Defaults to false.
	Durable bool

	// Programs must be in the folder of the server's, such as pg_dump. Downloaded
	// servers have none but their own; where OUTBOX_POSTGRES_VERSION leads to one
	// of them, the server is another one that is installed, of whatever version.
	// Defaults to none.
	Programs []string
}

// defaultSettings suit a server that many test binaries' worth of connections,
// slots and prepared transactions share.
func defaultSettings() map[string]string {
	return map[string]string{
		"wal_level":                 "logical",
		"max_wal_senders":           "60",
		"max_replication_slots":     "60",
		"max_connections":           "300",
		"max_prepared_transactions": "20",
		"shared_buffers":            "256MB",
		"fsync":                     "off",
		"timezone":                  "UTC",
		"log_timezone":              "UTC",
		// The log is searched for messages, so they must be in one language.
		"lc_messages": "C",
		// Segments live in the data folder and go with it; the default would
		// leave one in /dev/shm after Kill.
		"dynamic_shared_memory_type": "mmap",
	}
}

// reserved are the settings that this package chooses: by which it reaches and
// knows the server, and by which the log comes to the file that it reads.
var reserved = []string{
	"port", "listen_addresses", "unix_socket_directories", "cluster_name",
	"data_directory", "hba_file", "ident_file", "external_pid_file", "logging_collector", "log_destination",
}

// settings returns the defaults overridden by o, or an error that names the
// setting that may not be overridden.
func (o Options) settings() (map[string]string, error) {
	all := defaultSettings()
	if o.Durable {
		all["fsync"] = "on"
	}
	return mergeSettings(all, o.Settings)
}

// mergeSettings returns base overridden by extra, changing neither.
func mergeSettings(base, extra map[string]string) (map[string]string, error) {
	merged := maps.Clone(base)
	for name, value := range extra {
		name = strings.ToLower(name)
		if slices.Contains(reserved, name) {
			return nil, fmt.Errorf("pgtest: setting %q is chosen by this package and can't be overridden", name)
		}
		merged[name] = value
	}
	return merged, nil
}

// renderSettings returns the text of a configuration file, sorted by name.
func renderSettings(settings map[string]string) string {
	// In a quoted value postgresql.conf knows doubled quotes and C escapes.
	quote := strings.NewReplacer(`\`, `\\`, `'`, `''`, "\n", `\n`)
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&b, "%s = '%s'\n", name, quote.Replace(settings[name]))
	}
	return b.String()
}
