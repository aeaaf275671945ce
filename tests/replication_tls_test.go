//go:build unix

package tests

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
)

// Over TLS, whose records have their own way with deadlines.
func TestReplicationTLS(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	certificate, key := filepath.Join(root, "server.crt"), filepath.Join(root, "server.key")
	makeCertificate(t, certificate, key)
	server := pgtest.Own(t, pgtest.Options{})
	// The server reads its key as its own user, from its own folder.
	copyInto(t, server.DataDir(), certificate, 0o644)
	copyInto(t, server.DataDir(), key, 0o600)
	require.NoError(t, server.Reconfigure(t.Context(), map[string]string{"ssl": "on"}))

	c := captureOn(t, server, `CREATE TABLE t (id text, filler text)`)
	url := strings.Replace(c.url, "sslmode=disable", "sslmode=verify-full&sslrootcert="+certificate, 1)
	require.Contains(t, url, "verify-full")
	conn := connectAt(t, url, replication.ConnectOptions{})
	c.create(conn, false)
	reader := c.start(conn, replication.Options{StatusInterval: 10 * time.Millisecond})
	var encrypted bool
	require.NoError(t, c.pool.QueryRow(t.Context(), `SELECT ssl FROM pg_stat_ssl WHERE pid = $1`, conn.PID()).Scan(&encrypted))
	require.True(t, encrypted)
	// Deadlines pass in the middle of records, all the time.
	const rows = 20_000
	go func() {
		for range 500 {
			reader.Ping()
			time.Sleep(time.Millisecond)
		}
	}()
	c.exec(`INSERT INTO t SELECT i::text, repeat('x', i % 1000) FROM generate_series(1, $1::int) i`, rows)
	events := transaction(t, reader)
	require.Len(t, inserted(events), rows)
	require.NoError(t, reader.Confirm(commitOf(events).EndLSN))
	require.NoError(t, reader.Close())
	slot, err := replication.InspectSlot(t.Context(), c.pool, c.slot)
	require.NoError(t, err)
	require.Equal(t, commitOf(events).EndLSN, slot.ConfirmedFlushLSN)
	require.Zero(t, slot.ActivePID)

	config, err := pgconn.ParseConfig(strings.Replace(c.url, "sslmode=disable", "sslmode=verify-full", 1))
	require.NoError(t, err)
	_, err = replication.Connect(t.Context(), config, replication.ConnectOptions{})
	require.ErrorContains(t, err, "certificate")
}

func makeCertificate(t *testing.T, certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "127.0.0.1"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(certificate, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644))
	der, err = x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600))
}

// copyInto copies a file into a server's folder, for the user whose folder that
// is.
func copyInto(t *testing.T, folder, file string, mode os.FileMode) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	target := filepath.Join(folder, filepath.Base(file))
	require.NoError(t, os.WriteFile(target, text, mode))
	info, err := os.Stat(folder)
	require.NoError(t, err)
	owner := info.Sys().(*syscall.Stat_t)
	require.NoError(t, os.Chown(target, int(owner.Uid), int(owner.Gid)))
}
