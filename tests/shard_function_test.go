package tests

import (
	"crypto/rand"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/shard"
)

// The tables are read by the shard function of SQL, the write-ahead log by the
// one of Go. A key on which they differ would come from neither or from both.
func TestShardsAgreeInGoAndSQL(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	keys := []string{"", " ", "a", "A", "0", "ä", "a\u0308", "\U0001F4EE", "日本語", "\\x", "'", "\t\n", strings.Repeat("k", 1024)}
	for range 500 {
		var raw [12]byte
		_, err := rand.Read(raw[:])
		require.NoError(t, err)
		keys = append(keys, strings.ReplaceAll(strings.ToValidUTF8(string(raw[:]), "ü"), "\x00", "∅"), rand.Text())
	}
	ids := make([]int64, len(keys))
	for i := range ids {
		var raw [8]byte
		_, err := rand.Read(raw[:])
		require.NoError(t, err)
		ids[i] = int64(binary.BigEndian.Uint64(raw[:])>>1) | 1
	}
	for _, shards := range []int{1, 2, 3, 7, 8, 100, 256} {
		rows, err := f.pool.Query(t.Context(), f.sql(
			"SELECT outbox.shard(nullif(k, ''), i, $3) FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS u (k, i, n) ORDER BY n"), keys, ids, shards)
		require.NoError(t, err)
		found, err := pgx.CollectRows(rows, pgx.RowTo[int])
		require.NoError(t, err)
		require.Len(t, found, len(keys))
		for i, key := range keys {
			require.Equal(t, found[i], shard.Of(key, ids[i], shards), "key %q, id %d of %d shards", key, ids[i], shards)
		}
	}
}
