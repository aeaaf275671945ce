package replication_test

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/millrace/watermill-outbox/replication"
)

// Print the names that are inserted into a table, from a slot that remembers
// what was printed.
func Example() {
	if err := printNames(context.Background(), os.Getenv("DATABASE_URL")); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

func printNames(ctx context.Context, url string) error {
	config, err := pgconn.ParseConfig(url)
	if err != nil {
		return err
	}
	conn, err := replication.Connect(ctx, config, replication.ConnectOptions{
		Settings: map[string]string{"lock_timeout": "2s"},
	})
	if err != nil {
		return err
	}
	// Nothing once the stream has the connection.
	defer conn.Close(ctx)

	reader, err := replication.StartReader(ctx, conn, "names", 0, replication.Options{
		Publications: []string{"people"},
		Binary:       true,
	})
	switch {
	case replication.IsSlotGone(err):
		return fmt.Errorf("read the table, and make a new slot: %w", err)
	case replication.IsRetryable(err):
		time.Sleep(time.Second) // with a back-off, in earnest
		return printNames(ctx, url)
	case err != nil:
		return err
	}
	// What was confirmed is sent.
	defer reader.Close()

	types := pgtype.NewMap()
	for {
		event, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		switch event := event.(type) {
		case *replication.Insert:
			i := event.Relation.Column("name")
			if i < 0 || event.New[i].IsNull() {
				continue
			}
			var name string
			if err := types.Scan(event.Relation.Columns[i].TypeOID, event.New[i].FormatCode(), event.New[i].Data, &name); err != nil {
				return err
			}
			fmt.Println(name)
		case *replication.Commit:
			if err := reader.Confirm(event.EndLSN); err != nil {
				return err
			}
		case *replication.Keepalive:
			// All before it has been printed, so the slot need not keep it.
			if err := reader.Confirm(event.WALEnd); err != nil {
				return err
			}
		}
	}
}
