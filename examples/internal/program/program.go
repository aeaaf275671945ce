// Package program is what the examples have in common as programs. It has nothing
// to do with the outbox.
package program

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/millrace/watermill-outbox/examples/internal/database"
)

// Main is the body of main: it runs an example until that ends or is interrupted,
// prints its result, and exits with 1 if something went wrong.
func Main(name string, run func(ctx context.Context) (result fmt.Stringer, ok bool, err error)) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the program at once.
	context.AfterFunc(ctx, stop)
	result, ok, err := run(ctx)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintf(os.Stderr, "%s: interrupted\n", name)
		os.Exit(1)
	case err != nil:
		fmt.Fprintf(os.Stderr, "%s: %s\n", name, err)
		os.Exit(1)
	}
	fmt.Println(result)
	if !ok {
		os.Exit(1)
	}
}

// OnDatabase runs an example on a new database, with a pool of at most conns
// connections, and drops that.
func OnDatabase[T any](ctx context.Context, conns int32, run func(ctx context.Context, db *pgxpool.Pool) (T, error)) (result T, err error) {
	fmt.Println("Looking for a PostgreSQL ...")
	db, err := database.Open(ctx, conns)
	if err != nil {
		return result, err
	}
	defer Closing(&err, "database", db.Close)
	fmt.Println("  database", db)
	return run(ctx, db.Pool)
}

// Closing closes something in a deferred call, and adds what goes wrong to the
// error.
func Closing(err *error, what string, closer func() error) {
	if problem := closer(); problem != nil {
		*err = errors.Join(*err, fmt.Errorf("close the %s: %w", what, problem))
	}
}
