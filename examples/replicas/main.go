// Command replicas runs a service in three processes, kills and restarts them
// under load, and shows how the shards of a topic are shared among them.
//
//	go run ./examples/replicas
//
// It starts itself again three times, as the replicas A, B and C. Each subscribes
// to the same topic for the same group, which divides it into 8 shards by the
// ordering key, the order. Meanwhile orders are changed, about 200 times a
// second, each in a transaction that publishes the change; every tenth is rolled
// back. A replica is killed, one is stopped, all are restarted in turn, and at
// the end there are 4 shards instead of 8. After each step the program waits
// until the shards are spread evenly again, and says who has how many, how long
// that took, and how long messages had to wait. The last line compares what was
// handled with what was committed:
//
//	published=1949 rolled_back=216 handled=1961 lost=0 repeated=12 out_of_order=0 (repeated: ...)
//
// What a killed replica had done and not yet stored is done again by the next:
// delivery is at least once. A clean stop repeats nothing.
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one.
//
// In replica.go is what a replica is, in phases.go what happens to them and when,
// in processes.go how they are started and ended, in balance.go how the shards
// are looked at, in load.go the service that publishes, in audit.go the
// comparison, and here what connects them.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	topic = "orders"
	group = "shipping"

	shards      = 8
	fewerShards = 4
	// lease is how long a replica that was killed keeps its shards. A service
	// does better with the default of 10 s, which survives longer interruptions.
	lease = 2 * time.Second

	// steady is how long the program goes on after each step.
	steady = 500 * time.Millisecond
	// conns is one connection for each writer and two to look at the tables.
	conns = writers + 2
)

func main() {
	replicaMain() // does not return in a replica

	program.Main("replicas", func(ctx context.Context) (fmt.Stringer, bool, error) {
		r, err := program.OnDatabase(ctx, conns, func(ctx context.Context, db *pgxpool.Pool) (result, error) {
			return run(ctx, db, steady, os.Stdout)
		})
		return r, r.ok(), err
	})
}

// run connects the parts, goes through the phases and compares. The deferred
// calls are the order of a shutdown: first who publishes, then the replicas, then
// what was used here.
func run(ctx context.Context, db *pgxpool.Pool, steady time.Duration, out io.Writer) (_ result, err error) {
	logger := newLogger("parent")
	// Who cannot go on ends the others.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	if err := schema.Migrate(ctx, db, schema.Config{}); err != nil {
		return result{}, err
	}
	if err := createTables(ctx, db); err != nil {
		return result{}, err
	}
	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{RequireTx: true}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "publisher", publisher.Close)
	// Only to ask for another number of shards: any process may.
	consumer, err := outbox.NewConsumer(db.Config(), outbox.ConsumerConfig{Lease: lease}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "consumer", consumer.Close)

	processes, err := newProcesses(db.Config().ConnString(), cancel)
	if err != nil {
		return result{}, err
	}
	defer processes.kill()

	load := startLoad(ctx, &orderService{db: db, publisher: publisher}, cancel)
	defer load.end()

	p := &phases{db: db, consumer: consumer, processes: processes, load: load, steady: steady, out: out}
	if err := p.run(ctx); err != nil {
		return result{}, err
	}
	committed, err := versions(ctx, db)
	if err != nil {
		return result{}, err
	}
	deliveries, err := handled(ctx, db)
	if err != nil {
		return result{}, err
	}
	r := compare(committed, deliveries, processes.killed)
	r.rolledBack = int(load.rolledBack.Load())
	return r, nil
}

// createTables creates the service's table, and the one in which the replicas
// write down what they have handled. Its rows are numbered in the order in which
// they were written.
func createTables(ctx context.Context, db *pgxpool.Pool) error {
	_, err := db.Exec(ctx, `
		CREATE TABLE orders (
			id      int PRIMARY KEY,
			version int NOT NULL DEFAULT 0
		);
		CREATE TABLE handled (
			number   bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			at       timestamptz NOT NULL DEFAULT clock_timestamp(),
			order_id int         NOT NULL,
			version  int         NOT NULL,
			replica  text        NOT NULL,
			pid      int         NOT NULL,
			waited   interval    NOT NULL
		)`)
	if err != nil {
		return err
	}
	_, err = db.Exec(ctx, "INSERT INTO orders (id) SELECT generate_series(1, $1)", orders)
	return err
}

// newLogger logs warnings and errors, with the name of who has them.
func newLogger(name string) watermill.LoggerAdapter {
	handler := slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})
	return watermill.NewSlogLogger(slog.New(handler).With("process", name))
}
