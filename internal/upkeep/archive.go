package upkeep

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"

	"github.com/jackc/pgx/v5"
)

// ErrNotRead is returned when an archive did not read all of a partition.
var ErrNotRead = errors.New("the archive returned before it had read all of the partition")

// Archive stores what a partition holds, as CSV with a header. It must read to the
// end, and return an error if it did not keep all of it.
type Archive func(ctx context.Context, partition Partition, content io.Reader) error

// archive copies a partition to the archive. The partition stays when it returns an
// error.
func (p *pass) archive(ctx context.Context, part Partition) error {
	var text string
	log, spare := pgx.Identifier{p.config.Schema, "messages"}.Sanitize(), pgx.Identifier{p.config.Schema, "messages_default"}.Sanitize()
	if err := p.table.call(ctx, p.config.Timeout, archiveText, []any{part.Name, log, spare}, &text); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	content, out := io.Pipe()
	copied := make(chan error, 1)
	go func() {
		err := p.session.CopyTo(ctx, out, text)
		_ = out.CloseWithError(err) // always nil; with a nil error the reader sees the end
		copied <- err
	}()
	ended := &endReader{Reader: content}
	err := callArchive(ctx, p.config.Archive, part, ended)
	if err == nil && !ended.ended {
		err = ErrNotRead
	}
	if err != nil {
		cancel()
		p.session.Close() // in the middle of an answer that nobody reads
	}
	_ = content.CloseWithError(ErrNotRead) // always nil
	if failed := <-copied; err == nil {
		err = failed
	}
	if err != nil {
		return fmt.Errorf("archive: %w", err)
	}
	var noted bool
	if err := p.table.call(ctx, p.config.Timeout, "SELECT outbox.upkeep_archived($1::text, $2::text::pg_snapshot)", []any{part.Name, part.seal}, &noted); err != nil {
		return err
	}
	if !noted {
		return errors.New("archive: the partition has changed meanwhile; it is archived again")
	}
	return nil
}

func callArchive(ctx context.Context, archive Archive, part Partition, content io.Reader) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return archive(ctx, part, content)
}

// endReader notes whether the end was reached.
type endReader struct {
	io.Reader

	ended bool
}

// Read implements io.Reader.
func (r *endReader) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	if errors.Is(err, io.EOF) {
		r.ended = true
	}
	return n, err
}
