package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/millrace/watermill-outbox/schema"
)

const (
	// bareReadBuffer and bareReadPause let rows come together in the kernel and
	// be read by one call: what a reader of many small transactions gains most
	// from.
	bareReadBuffer = 256 << 10
	bareReadPause  = 200 * time.Microsecond
	// bareStatus is how often the server hears how far a bare stream has come.
	bareStatus = time.Second
)

// bareStream reads the log from the WAL as somebody without the library would
// who wants nothing but the rows, as fast as they come.
type bareStream struct {
	conn      *pgconn.PgConn
	in        *bufio.Reader // between the socket and conn
	relations map[uint32]bareColumns
	received  pglogrepl.LSN
	// pause is what it waits before it reads again.
	pause time.Duration
}

// openBareStream makes a temporary slot and starts to stream from it, with
// bareReadPause to be fast with many rows, with 0 to be prompt with each.
func openBareStream(ctx context.Context, url string, pause time.Duration) (*bareStream, error) {
	config, err := pgconn.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	s := &bareStream{relations: map[uint32]bareColumns{}, pause: pause}
	config.RuntimeParams["replication"] = "database"
	build := config.BuildFrontend
	config.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		s.in = bufio.NewReaderSize(r, bareReadBuffer)
		return build(s.in, w)
	}
	if s.conn, err = pgconn.ConnectConfig(ctx, config); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("outbox_bench_%d", s.conn.PID())
	slot, err := pglogrepl.CreateReplicationSlot(ctx, s.conn, name, "pgoutput", pglogrepl.CreateReplicationSlotOptions{Temporary: true})
	if err != nil {
		return nil, errors.Join(err, s.conn.Close(ctx))
	}
	if s.received, err = pglogrepl.ParseLSN(slot.ConsistentPoint); err != nil {
		return nil, errors.Join(err, s.conn.Close(ctx))
	}
	publication := strings.ReplaceAll(schema.PublicationName(schema.DefaultName), "'", "''")
	err = pglogrepl.StartReplication(ctx, s.conn, name, s.received, pglogrepl.StartReplicationOptions{PluginArgs: []string{
		"proto_version '1'", "publication_names '" + publication + "'", "binary 'true'",
	}})
	if err != nil {
		return nil, errors.Join(err, s.conn.Close(ctx))
	}
	return s, nil
}

// read calls row for each row until the context ends, and returns nil then. That
// end is a deadline in the past, which report may replace: the loop looks, too.
func (s *bareStream) read(ctx context.Context, row func(bareStreamRow)) error {
	defer context.AfterFunc(ctx, func() { _ = s.conn.Conn().SetReadDeadline(time.Unix(1, 0)) })()
	frontend := s.conn.Frontend()
	hasRead := false
	if err := s.report(ctx); err != nil {
		return err
	}
	for ctx.Err() == nil {
		if hasRead && frontend.ReadBufferLen() == 0 && s.in.Buffered() == 0 {
			time.Sleep(s.pause)
			hasRead = false
		}
		message, err := frontend.Receive()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if err := s.report(ctx); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		hasRead = true
		switch message := message.(type) {
		case *pgproto3.CopyData:
			if err := s.take(ctx, message.Data, row); err != nil {
				return err
			}
		case *pgproto3.ErrorResponse:
			return pgconn.ErrorResponseToPgError(message)
		}
	}
	return nil
}

// report says how far the stream has come, and when to do so again.
func (s *bareStream) report(ctx context.Context) error {
	if err := s.conn.Conn().SetReadDeadline(time.Now().Add(bareStatus)); err != nil {
		return err
	}
	return pglogrepl.SendStandbyStatusUpdate(ctx, s.conn, pglogrepl.StandbyStatusUpdate{WALWritePosition: s.received})
}

func (s *bareStream) take(ctx context.Context, data []byte, row func(bareStreamRow)) error {
	switch data[0] {
	case pglogrepl.PrimaryKeepaliveMessageByteID:
		keepalive, err := pglogrepl.ParsePrimaryKeepaliveMessage(data[1:])
		if err != nil {
			return err
		}
		s.received = max(s.received, keepalive.ServerWALEnd)
		if keepalive.ReplyRequested {
			return s.report(ctx)
		}
		return nil
	case pglogrepl.XLogDataByteID:
	default:
		return fmt.Errorf("a message of kind %q", data[0])
	}
	wal, err := pglogrepl.ParseXLogData(data[1:])
	if err != nil {
		return err
	}
	message, err := pglogrepl.Parse(wal.WALData)
	if err != nil {
		return err
	}
	switch message := message.(type) {
	case *pglogrepl.RelationMessage:
		s.relations[message.RelationID], err = newBareColumns(message)
		return err
	case *pglogrepl.InsertMessage:
		r, err := s.relations[message.RelationID].row(message.Tuple)
		if err != nil {
			return err
		}
		row(r)
	case *pglogrepl.CommitMessage:
		s.received = max(s.received, message.TransactionEndLSN)
	}
	return nil
}

func (s *bareStream) close(ctx context.Context) error { return s.conn.Close(ctx) }

// bareColumns are where the columns of a bareStreamRow are.
type bareColumns struct{ id, xid, topic, key, uuid, metadata, payload, createdAt int }

func newBareColumns(relation *pglogrepl.RelationMessage) (bareColumns, error) {
	at := map[string]int{}
	for i, c := range relation.Columns {
		at[c.Name] = i
	}
	for _, name := range []string{"id", "xid", "topic", "key", "uuid", "metadata", "payload", "created_at"} {
		if _, ok := at[name]; !ok {
			return bareColumns{}, fmt.Errorf("relation %s has no column %s", relation.RelationName, name)
		}
	}
	return bareColumns{at["id"], at["xid"], at["topic"], at["key"], at["uuid"], at["metadata"], at["payload"], at["created_at"]}, nil
}

// bareStreamRow is a row with its columns decoded. Metadata stay JSON.
type bareStreamRow struct {
	id, xid          int64
	topic, key, uuid string
	metadata         []byte
	payload          []byte
	createdAt        time.Time
}

func (c bareColumns) row(tuple *pglogrepl.TupleData) (r bareStreamRow, err error) {
	value := func(i int) []byte { return tuple.Columns[i].Data }
	number := func(i int) int64 {
		if len(value(i)) != 8 {
			err = fmt.Errorf("column %d has %d bytes instead of 8", i, len(value(i)))
			return 0
		}
		return int64(binary.BigEndian.Uint64(value(i)))
	}
	return bareStreamRow{
		id: number(c.id), xid: number(c.xid),
		topic: string(value(c.topic)), key: string(value(c.key)), uuid: string(value(c.uuid)),
		metadata: value(c.metadata), payload: value(c.payload),
		createdAt: time.UnixMicro(postgresEpoch + number(c.createdAt)),
	}, err
}

// postgresEpoch is where PostgreSQL's binary times begin, in microseconds.
var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()
