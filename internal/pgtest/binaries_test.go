package pgtest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakePrograms makes a folder with files that look like a server's programs.
func fakePrograms(t *testing.T, dir string) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o755))
	for _, name := range []string{"initdb", "postgres"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"), 0o755))
	}
	return dir
}

func TestFind(t *testing.T) {
	t.Parallel()
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	explicit := fakePrograms(t, filepath.Join(root, "explicit"))
	onPath := fakePrograms(t, filepath.Join(root, "path"))
	fakePrograms(t, filepath.Join(root, "debian", "9.6", "bin"))
	fakePrograms(t, filepath.Join(root, "debian", "13", "bin"))
	newest := fakePrograms(t, filepath.Join(root, "rpm-17", "bin"))
	// Debian leaves folders of removed versions behind, with client programs.
	require.NoError(t, os.MkdirAll(filepath.Join(root, "debian", "18", "bin"), 0o755))
	linked := filepath.Join(root, "linked")
	require.NoError(t, os.MkdirAll(linked, 0o755))
	for _, name := range []string{"initdb", "postgres"} {
		require.NoError(t, os.Symlink(filepath.Join(newest, name), filepath.Join(linked, name)))
	}
	globs := []string{filepath.Join(root, "debian", "*", "bin"), filepath.Join(root, "rpm-*", "bin")}
	failed := errors.New("no network")
	download := func(context.Context, int) (string, error) { return "", failed }

	tests := []struct {
		name   string
		finder finder
		want   string
		err    string
	}{
		{"the explicit folder wins", finder{"", explicit, []string{onPath}, globs, download}, explicit, ""},
		{"then PATH", finder{"", "", []string{"", ".", root, onPath}, globs, download}, onPath, ""},
		{"links on PATH are followed", finder{"", "", []string{linked}, globs, download}, newest, ""},
		{"then the newest of a distribution", finder{"", "", []string{root}, globs, download}, newest, ""},
		{"then a download", finder{"", "", nil, nil, func(context.Context, int) (string, error) { return "/cache", nil }}, "/cache", ""},
		{"whose failure is told", finder{"", "", nil, []string{filepath.Join(root, "none*")}, download}, "", "no network"},
		// Falling back would test with another version than was asked for.
		{"a wrong explicit folder is an error", finder{"", root, []string{onPath}, globs, download}, "", "OUTBOX_POSTGRES_BIN=" + root + " is not a folder with the programs of a PostgreSQL server"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got, err := test.finder.find(t.Context())
			if test.err != "" {
				require.ErrorContains(t, err, test.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.want, got)
		})
	}
}

// What has the programs is taken though it is of another version, and only if what
// is wanted lacks them.
func TestFindWith(t *testing.T) {
	t.Parallel()
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	downloaded := versionedPrograms(t, filepath.Join(root, "cache", "18"), "18.4")
	for _, version := range []string{"14", "15", "16"} {
		dir := versionedPrograms(t, filepath.Join(root, version, "bin"), version+".1")
		if version != "16" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "pg_dump"), nil, 0o755))
		}
	}
	f := finder{globs: []string{filepath.Join(root, "*", "bin")}, download: func(context.Context, int) (string, error) { return downloaded, nil }}
	for version, want := range map[string]string{"14": "14/bin", "15": "15/bin", "16": "15/bin", "18": "15/bin"} {
		f.version = version
		got, err := f.findWith(t.Context(), []string{"pg_dump"})
		require.NoError(t, err)
		require.Equal(t, filepath.Join(root, want), got, version)
	}
	f.version = "18"
	got, err := f.findWith(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, downloaded, got)
	_, err = f.findWith(t.Context(), []string{"pg_dump", "pg_upgrade"})
	require.ErrorContains(t, err, "no PostgreSQL on this machine has pg_dump and pg_upgrade")
	f.explicit = root
	_, err = f.findWith(t.Context(), []string{"pg_dump"})
	require.ErrorContains(t, err, EnvPostgresBin)
}

func TestCheckPrograms(t *testing.T) {
	t.Parallel()
	dir := fakePrograms(t, t.TempDir())
	require.NoError(t, checkPrograms(dir))
	require.NoError(t, os.Chmod(filepath.Join(dir, "initdb"), 0o644))
	require.ErrorContains(t, checkPrograms(dir), "initdb is not a program")
	require.ErrorIs(t, checkPrograms(t.TempDir()), os.ErrNotExist)
}

// The real thing, by way of the environment.
func TestStartWithNamedPrograms(t *testing.T) {
	bin := programs(t)
	t.Run(EnvPostgresBin, func(t *testing.T) {
		t.Setenv("PATH", "/bin:/usr/bin")
		t.Setenv(EnvPostgresBin, bin)
		s := Own(t, Options{})
		require.Equal(t, bin, s.sup.bin)
	})
	t.Run("PATH", func(t *testing.T) {
		t.Setenv("PATH", bin+":/bin:/usr/bin")
		t.Setenv(EnvPostgresBin, "")
		s := Own(t, Options{})
		require.Equal(t, bin, s.sup.bin)
	})
	t.Run("wrong", func(t *testing.T) {
		t.Setenv(EnvPostgresBin, "/nowhere")
		_, err := Start(t.Context(), Options{})
		require.ErrorContains(t, err, "OUTBOX_POSTGRES_BIN=/nowhere is not a folder")
	})
}
