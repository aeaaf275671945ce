package replication

import (
	"context"

	"github.com/jackc/pglogrepl"
)

// System says which server this is and how far its WAL has come.
type System struct {
	// ID is the cluster's system identifier. It is the same for a primary and
	// its physical standbys, and LSNs are comparable between these.
	ID string
	// Timeline changes with each promotion: LSNs behind the point where it
	// changed mean other changes than before.
	Timeline int32
	// FlushLSN is how far the WAL has been flushed; on a standby, replayed.
	FlushLSN LSN
	// Database is the database connected to.
	Database string
}

// IdentifySystem asks the server who it is.
func (c *Conn) IdentifySystem(ctx context.Context) (System, error) {
	if c.taken {
		return System{}, ErrConnTaken
	}
	result, err := pglogrepl.IdentifySystem(ctx, c.pg)
	if err != nil {
		return System{}, wrap("identify system", "", aboutConnection, err)
	}
	return System{
		ID:       result.SystemID,
		Timeline: result.Timeline,
		FlushLSN: LSN(result.XLogPos),
		Database: result.DBName,
	}, nil
}
