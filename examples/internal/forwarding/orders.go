package forwarding

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

// Topic is where the service publishes to.
const Topic = "orders"

const (
	orders  = 20
	changes = 30 // of each order
	// declined is which change of an order is rolled back: each 10th.
	declined = 10
	// clerks is how many work at the orders at the same time.
	clerks = 4
	// committed is how many changes are to be in the broker at the end.
	committed = orders * (changes - changes/declined)
)

// errDeclined rolls a transaction back.
var errDeclined = errors.New("declined")

// change is a change of an order, and the event that says so.
type change struct {
	ID      string `json:"id"`
	Order   int    `json:"order"`
	Version int    `json:"version"`
}

// service changes orders.
type service struct {
	db        *pgxpool.Pool
	publisher message.Publisher
}

// createTables makes the tables of the service. That of the changes is what the broker is
// compared with.
func (s service) createTables(ctx context.Context) error {
	_, err := s.db.Exec(ctx, `
		CREATE TABLE orders (id int PRIMARY KEY, version int NOT NULL DEFAULT 0);
		CREATE TABLE changes (id text PRIMARY KEY, order_id int NOT NULL, version int NOT NULL);`)
	if err != nil {
		return err
	}
	_, err = s.db.Exec(ctx, "INSERT INTO orders (id) SELECT generate_series(1, $1)", orders)
	return err
}

// work makes all changes, some of which are rolled back.
func (s service) work(ctx context.Context) error {
	var clerking sync.WaitGroup
	errs := make([]error, clerks)
	for clerk := range clerks {
		clerking.Go(func() {
			for i := 1; i <= changes && errs[clerk] == nil; i++ {
				for order := 1 + clerk; order <= orders && errs[clerk] == nil; order += clerks {
					err := s.change(ctx, order, i%declined == 0)
					if !errors.Is(err, errDeclined) {
						errs[clerk] = err
					}
				}
			}
		})
	}
	clerking.Wait()
	return errors.Join(errs...)
}

// change changes an order and publishes the event, or does neither.
func (s service) change(ctx context.Context, order int, decline bool) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		c := change{ID: watermill.NewUUID(), Order: order}
		// The row first: its lock puts the events of an order in order.
		err := tx.QueryRow(ctx, "UPDATE orders SET version = version + 1 WHERE id = $1 RETURNING version", order).Scan(&c.Version)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "INSERT INTO changes VALUES ($1, $2, $3)", c.ID, c.Order, c.Version); err != nil {
			return err
		}
		payload, err := json.Marshal(c)
		if err != nil {
			return err
		}
		msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), c.ID, payload)
		msg.Metadata.Set(outbox.DefaultKeyMetadata, strconv.Itoa(order))
		if err := s.publisher.Publish(Topic, msg); err != nil {
			return err
		}
		if decline {
			return errDeclined
		}
		return nil
	})
}

// committed returns the changes that were committed.
func (s service) committed(ctx context.Context) ([]change, error) {
	rows, err := s.db.Query(ctx, "SELECT id, order_id, version FROM changes")
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[change])
}
