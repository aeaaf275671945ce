package main

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

// topic is where the events about orders go.
const topic = "orders"

// ItemAdded is the event that an order has one more item.
type ItemAdded struct {
	OrderID int `json:"order_id"`
	// Version counts the changes of the order, from 1.
	Version int `json:"version"`
	Items   int `json:"items"`
}

// errDeclined is the business reason to roll a transaction back.
var errDeclined = errors.New("payment declined")

// orderService changes orders and announces every change.
type orderService struct {
	db *pgxpool.Pool
	// publisher is one for all transactions and all workers.
	publisher message.Publisher
}

// createTable creates the business table with n orders in it.
func (s *orderService) createTable(ctx context.Context, n int) error {
	_, err := s.db.Exec(ctx, `CREATE TABLE orders (
		id      int PRIMARY KEY,
		version int NOT NULL DEFAULT 0,
		items   int NOT NULL DEFAULT 0
	)`)
	if err != nil {
		return err
	}
	_, err = s.db.Exec(ctx, "INSERT INTO orders (id) SELECT generate_series(1, $1)", n)
	return err
}

// addItem adds an item to an order and publishes the event, both or neither.
func (s *orderService) addItem(ctx context.Context, orderID int, declined bool) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		// First the row, which locks it, then the event: whoever changes the
		// order next publishes after this transaction has committed, and so
		// the events of an order are delivered in the order of its versions.
		event := ItemAdded{OrderID: orderID}
		err := tx.QueryRow(ctx,
			"UPDATE orders SET version = version + 1, items = items + 1 WHERE id = $1 RETURNING version, items",
			orderID).Scan(&event.Version, &event.Items)
		if err != nil {
			return err
		}
		payload, err := json.Marshal(event)
		if err != nil {
			return err
		}
		// The context carries the transaction that the message is written in.
		msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), watermill.NewUUID(), payload)
		msg.Metadata.Set(outbox.DefaultKeyMetadata, strconv.Itoa(orderID))
		if err := s.publisher.Publish(topic, msg); err != nil {
			return err
		}
		if declined {
			return errDeclined // rolls back the change and the event
		}
		return nil
	})
}

// versions returns the version of each order, as committed.
func (s *orderService) versions(ctx context.Context) (map[int]int, error) {
	rows, err := s.db.Query(ctx, "SELECT id, version FROM orders")
	if err != nil {
		return nil, err
	}
	versions := map[int]int{}
	var id, version int
	_, err = pgx.ForEachRow(rows, []any{&id, &version}, func() error {
		versions[id] = version
		return nil
	})
	return versions, err
}
