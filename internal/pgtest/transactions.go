package pgtest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"

	"github.com/jackc/pgx/v5"
)

// skipAtOnce is how many transactions are skipped in one step at most, unless it is
// a multiple of 2^32: the lower half of an id counts in a circle, and from 2^31 on
// the server would take what is old for what is to come.
const skipAtOnce = 2_000_000_000

// SkipTransactions has the server go on with the transaction id next, as if all
// before it had been used: what a server has after years. It must be running, with
// nobody at work; it is shut down and started again, some times if next is far
// away. Its databases are frozen.
//
// There are tools for that, pg_resetwal, but not among downloaded programs.
func (s *Server) SkipTransactions(ctx context.Context, next uint64) error {
	for {
		now, err := s.freeze(ctx)
		if err != nil {
			return err
		}
		if now >= next {
			return nil
		}
		if err := s.Shutdown(ctx, Fast); err != nil {
			return err
		}
		reached := now
		err = s.exclusively(func() (err error) {
			reached, err = changeNextTransaction(s.DataDir(), next)
			return err
		})
		if err != nil && !errors.Is(err, errSplitRecord) { // the next checkpoint's record is elsewhere
			return err
		}
		if err := s.StartAgain(ctx); err != nil {
			return err
		}
		if reached >= next {
			return nil
		}
	}
}

// freeze freezes all rows of all databases, and returns the next transaction id.
func (s *Server) freeze(ctx context.Context) (next uint64, err error) {
	var names []string
	err = withConn(ctx, s.URL(), func(conn *pgx.Conn) error {
		if _, err := conn.Exec(ctx, "UPDATE pg_catalog.pg_database SET datallowconn = true WHERE datname = 'template0'"); err != nil {
			return err
		}
		rows, err := conn.Query(ctx, "SELECT datname FROM pg_catalog.pg_database WHERE datallowconn")
		if err != nil {
			return err
		}
		names, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	for _, name := range names {
		if err == nil {
			err = withConn(ctx, s.URLFor(name), func(conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "VACUUM (FREEZE)")
				return err
			})
		}
	}
	if err == nil {
		err = withConn(ctx, s.URL(), func(conn *pgx.Conn) error {
			return conn.QueryRow(ctx, "SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint").Scan(&next)
		})
	}
	if err != nil {
		return 0, fmt.Errorf("pgtest: freeze the databases: %w", err)
	}
	return next, nil
}

// errSplitRecord says that a record of WAL goes over the end of a page.
var errSplitRecord = errors.New("pgtest: the record of the last checkpoint is in two pieces")

// Where things are, the same in versions 14 to 18: see ControlFileData, CheckPoint,
// XLogRecord and XLogRecordDataHeaderShort.
const (
	controlCheckpointAt = 32 // the position of the last checkpoint's record
	controlCopyAt       = 40 // a copy of the checkpoint itself

	checkpointNextXidAt   = 24 // 64 bits
	checkpointOldestXidAt = 44
	checkpointSize        = 88

	recordHeader = 24 // the checksum at its end, of what follows and then of what is before
	recordData   = recordHeader + 2

	lowerHalf = 1<<32 - 1

	walPage    = 8192
	walSegment = 16 << 20
)

// changeNextTransaction changes, in the data folder of a server that was shut down,
// the next transaction id, in the direction of target, and returns what it is now:
// in the record of the checkpoint that the server begins with, and in the control
// file. What there is must be frozen.
func changeNextTransaction(data string, target uint64) (next uint64, err error) {
	controlPath := filepath.Join(data, controlFile)
	control, err := os.ReadFile(controlPath)
	if err != nil {
		return 0, fmt.Errorf("pgtest: read the control file: %w", err)
	}
	end, err := controlChecksum(control)
	if err != nil {
		return 0, err
	}
	order := binary.NativeEndian
	at := order.Uint64(control[controlCheckpointAt:])
	if at%walPage+recordData+checkpointSize > walPage {
		return 0, errSplitRecord
	}
	segments, err := filepath.Glob(filepath.Join(data, walFolder, fmt.Sprintf("????????%08X%08X", at>>32, at&lowerHalf/walSegment)))
	if err != nil || len(segments) != 1 {
		return 0, errors.Join(fmt.Errorf("pgtest: %d segments of WAL have the last checkpoint", len(segments)), err)
	}
	wal, err := os.ReadFile(segments[0])
	if err != nil {
		return 0, fmt.Errorf("pgtest: read the WAL: %w", err)
	}
	offset := at % walSegment
	record := wal[offset : offset+recordData+checkpointSize]
	inWAL, inControl := record[recordData:], control[controlCopyAt:controlCopyAt+checkpointSize]
	if string(inWAL) != string(inControl) || order.Uint32(record[recordHeader-4:]) != recordChecksum(record) {
		return 0, errors.New("pgtest: the last checkpoint is not where it is in the versions known")
	}
	before := order.Uint64(inWAL[checkpointNextXidAt:])
	if target <= before {
		return before, nil
	}
	if next = before + (target-before)>>32<<32; next == before {
		next = min(target, before+skipAtOnce)
	}
	for _, checkpoint := range [][]byte{inWAL, inControl} {
		order.PutUint64(checkpoint[checkpointNextXidAt:], next)
		// All that is older is frozen, as far as it counts.
		if next&lowerHalf != before&lowerHalf {
			order.PutUint32(checkpoint[checkpointOldestXidAt:], uint32(before&lowerHalf))
		}
	}
	order.PutUint32(record[recordHeader-4:], recordChecksum(record))
	order.PutUint32(control[end:], crc32.Checksum(control[:end], castagnoli))

	// The states of transactions are in files of a million, two bits each.
	states := filepath.Join(data, "pg_xact", fmt.Sprintf("%04X", next&lowerHalf>>20))
	if _, err := os.Stat(states); errors.Is(err, os.ErrNotExist) {
		if err := addFile(states, string(make([]byte, 1<<20/4))); err != nil {
			return 0, err
		}
	}
	return next, errors.Join(
		overwrite(segments[0], int64(offset), record),
		overwrite(controlPath, 0, control[:end+4]),
	)
}

func recordChecksum(record []byte) uint32 {
	return crc32.Update(crc32.Checksum(record[recordHeader:], castagnoli), castagnoli, record[:recordHeader-4])
}
