package pgtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// EnvPostgresBin is the environment variable that names the folder with the
// server's programs, for example /usr/lib/postgresql/17/bin.
const EnvPostgresBin = "OUTBOX_POSTGRES_BIN"

// distributionFolders is where packages put the server's programs: Debian and
// Ubuntu, the PostgreSQL project's RPMs, SUSE, Alpine, a build from source,
// Homebrew on both kinds of Mac, Postgres.app, the EDB installer, MacPorts.
var distributionFolders = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/lib/postgresql*/bin",
	"/usr/libexec/postgresql*",
	"/usr/local/pgsql/bin",
	"/opt/homebrew/opt/postgresql@*/bin",
	"/opt/homebrew/opt/postgresql/bin",
	"/usr/local/opt/postgresql@*/bin",
	"/usr/local/opt/postgresql/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	"/Library/PostgreSQL/*/bin",
	"/opt/local/lib/postgresql*/bin",
}

// finder finds the server's programs.
type finder struct {
	version  string   // value of EnvPostgresVersion
	explicit string   // value of EnvPostgresBin
	path     []string // folders of PATH
	globs    []string // patterns of folders
	download func(ctx context.Context, major int) (string, error)
}

func defaultFinder() finder {
	return finder{
		version:  os.Getenv(EnvPostgresVersion),
		explicit: os.Getenv(EnvPostgresBin),
		path:     filepath.SplitList(os.Getenv("PATH")),
		globs:    distributionFolders,
		download: func(ctx context.Context, major int) (string, error) { return defaultDownloader().download(ctx, major) },
	}
}

// find returns a folder with the server's programs: the explicit one, or else
// the first on PATH, or else the newest of a distribution, or else a download. If
// a version is wanted, those of another one do not count, and an explicit folder
// of another one is an error.
func (f finder) find(ctx context.Context) (string, error) {
	major, err := wantedMajor(f.version)
	if err != nil {
		return "", err
	}
	fits := func(dir string) bool {
		if checkPrograms(dir) != nil {
			return false
		}
		if major == 0 {
			return true
		}
		found, err := programsMajor(ctx, dir)
		return err == nil && found == major
	}
	if f.explicit != "" {
		if err := checkPrograms(f.explicit); err != nil {
			return "", fmt.Errorf("pgtest: %s=%s is not a folder with the programs of a PostgreSQL server (unset it to search elsewhere): %w", EnvPostgresBin, f.explicit, err)
		}
		if major != 0 {
			switch found, err := programsMajor(ctx, f.explicit); {
			case err != nil:
				return "", err
			case found != major:
				return "", fmt.Errorf("pgtest: %s=%s has programs of PostgreSQL %d, but %s is %d: unset one of them", EnvPostgresBin, f.explicit, found, EnvPostgresVersion, major)
			}
		}
		return filepath.Abs(f.explicit)
	}
	if dir, err := f.installed(fits); dir != "" || err != nil {
		return dir, err
	}
	return f.download(ctx, major)
}

// findWith returns a folder that has other programs, too. Downloads lack them, so
// where what find returns is one it is another one on this machine, of whatever
// version.
func (f finder) findWith(ctx context.Context, programs []string) (string, error) {
	dir, err := f.find(ctx)
	if err != nil || checkPrograms(dir, programs...) == nil {
		return dir, err
	}
	other, err := f.installed(func(dir string) bool { return checkPrograms(dir, programs...) == nil })
	if err == nil && other == "" {
		err = fmt.Errorf("pgtest: no PostgreSQL on this machine has %s, which a test needs; install one (Debian: apt-get install postgresql)", strings.Join(programs, " and "))
	}
	return other, err
}

// installed returns the first folder on PATH that fits, or else the newest of a
// distribution that does, or else "".
func (f finder) installed(fits func(dir string) bool) (string, error) {
	for _, dir := range f.path {
		if !filepath.IsAbs(dir) || !fits(dir) {
			continue
		}
		// A program finds its libraries and data from where it really is.
		real, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres"))
		if err == nil && checkPrograms(filepath.Dir(real)) == nil {
			return filepath.Dir(real), nil
		}
		return dir, nil
	}
	var found []string
	for _, pattern := range f.globs {
		dirs, err := filepath.Glob(pattern)
		if err != nil {
			return "", fmt.Errorf("pgtest: folders %s: %w", pattern, err)
		}
		for _, dir := range dirs {
			if fits(dir) {
				found = append(found, dir)
			}
		}
	}
	if len(found) > 0 {
		// Stable, so that among equals the order of the patterns decides.
		slices.SortStableFunc(found, func(a, b string) int { return compareVersions(folderVersion(b), folderVersion(a)) })
		return found[0], nil
	}
	return "", nil
}

// checkPrograms returns an error if dir lacks a program that every server needs, or
// one of others.
func checkPrograms(dir string, others ...string) error {
	for _, name := range append([]string{"initdb", "postgres"}, others...) {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if info.IsDir() || info.Mode()&0o111 == 0 {
			return fmt.Errorf("%s is not a program", filepath.Join(dir, name))
		}
	}
	return nil
}

// majors are the versions of programs by their folder: each server that is
// started asks.
var majors sync.Map

// programsMajor returns the major version of the programs in dir, by asking them.
func programsMajor(ctx context.Context, dir string) (int, error) {
	program := filepath.Join(dir, "postgres")
	if major, ok := majors.Load(program); ok {
		return major.(int), nil
	}
	output, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return 0, fmt.Errorf("pgtest: ask %s for its version: %w", program, err)
	}
	major, err := strconv.Atoi(number.FindString(string(output)))
	if err != nil {
		return 0, fmt.Errorf("pgtest: %s says its version is %q", program, output)
	}
	majors.Store(program, major)
	return major, nil
}

var number = regexp.MustCompile(`\d+`)

// folderVersion returns the numbers in a folder's name: [9 6] for
// /usr/pgsql-9.6/bin. A folder without any comes last.
func folderVersion(dir string) []int {
	var version []int
	for _, digits := range number.FindAllString(dir, -1) {
		n, err := strconv.Atoi(digits)
		if err == nil {
			version = append(version, n)
		}
	}
	return version
}

func compareVersions(a, b []int) int { return slices.Compare(a, b) }
