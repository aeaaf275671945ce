package live

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/shard"
	"github.com/millrace/watermill-outbox/internal/window"
)

// A buffer gets the rows of its shard, and only they count against the bound.
func TestBufferOfAShard(t *testing.T) {
	t.Parallel()

	const shards = 3
	s := &session{}
	buffers := make([]*Buffer, shards)
	for i := range buffers {
		buffers[i] = &Buffer{session: s, shard: Shard{Shard: i, Shards: shards}, ready: make(chan struct{}, 1)}
	}
	all := &Buffer{session: s, ready: make(chan struct{}, 1)}
	rows := make([]bufferedRow, 50)
	size := 0
	for i := range rows {
		rows[i].row = window.Row{ID: int64(i + 1), XID: 5}
		if i%3 > 0 {
			rows[i].row.Key = fmt.Sprint("key ", i%11)
		}
		size += rowSize(&rows[i].row)
	}
	for _, b := range append(buffers, all) {
		b.add(rows)
	}
	require.Len(t, all.rows, len(rows))
	total, bytes := 0, 0
	for i, b := range buffers {
		require.NotEmpty(t, b.rows)
		for _, row := range b.rows {
			require.Equal(t, i, shard.Of(row.Key, row.ID, shards))
		}
		total, bytes = total+len(b.rows), bytes+b.bytes
	}
	require.Equal(t, len(rows), total)
	require.Equal(t, size, bytes)
	require.Equal(t, 2*size, s.bytes)
}
