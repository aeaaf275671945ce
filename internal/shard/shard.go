// Package shard says which shard of a consumer group a message belongs to. The
// function shard in the schema says the same in SQL. Both read the same rows,
// one in the tables and the other in the write-ahead log, so they must agree;
// and they must never change while a group has more than one shard.
package shard

import (
	"crypto/md5" //nolint:gosec // spreads keys; keeps no secret
	"encoding/binary"
)

// Hash returns the number that decides on a message's shard, from its ordering
// key, or from its id if that is "", which is NULL in SQL.
func Hash(key string, id int64) int64 {
	if key == "" {
		return id
	}
	sum := md5.Sum([]byte(key)) //nolint:gosec // spreads keys; keeps no secret
	return int64(binary.BigEndian.Uint32(sum[:4]))
}

// Of returns the shard of a message, of so many: 0 to shards-1.
func Of(key string, id int64, shards int) int {
	if shards == 1 {
		return 0
	}
	return int(Hash(key, id) % int64(shards))
}
