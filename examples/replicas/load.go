package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	orders  = 100
	writers = 4
	// writeInterval is the time between two transactions of a writer.
	writeInterval = 20 * time.Millisecond
	// rollbackEvery is which transactions are rolled back: every tenth.
	rollbackEvery = 10
)

// OrderChanged is the event that an order has changed.
type OrderChanged struct {
	OrderID int `json:"order_id"`
	// Version counts the changes of the order, from 1.
	Version int `json:"version"`
}

// errDeclined is the business reason to roll a transaction back.
var errDeclined = errors.New("payment declined")

// orderService changes orders and announces every change.
type orderService struct {
	db        *pgxpool.Pool
	publisher message.Publisher
}

// change changes an order and publishes the event, both or neither. The row is
// locked first, so the events of an order are delivered in the order of its
// versions.
func (s *orderService) change(ctx context.Context, orderID int, declined bool) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		event := OrderChanged{OrderID: orderID}
		err := tx.QueryRow(ctx, "UPDATE orders SET version = version + 1 WHERE id = $1 RETURNING version", orderID).Scan(&event.Version)
		if err != nil {
			return err
		}
		payload, err := json.Marshal(event)
		if err != nil {
			return err
		}
		msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), watermill.NewUUID(), payload)
		// The key decides which shard the message is in, and what it waits for.
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

// load is writers at work.
type load struct {
	service          *orderService
	next, rolledBack atomic.Int64
	stop             chan struct{}
	stopOnce         sync.Once
	running          sync.WaitGroup
}

// startLoad has the service used until end is called. An error goes to failed.
func startLoad(ctx context.Context, service *orderService, failed context.CancelCauseFunc) *load {
	l := &load{service: service, stop: make(chan struct{})}
	for range writers {
		l.running.Go(func() {
			if err := l.write(ctx); err != nil {
				failed(err)
			}
		})
	}
	return l
}

// end returns when the last transaction has ended. It may be called more than
// once.
func (l *load) end() {
	l.stopOnce.Do(func() { close(l.stop) })
	l.running.Wait()
}

func (l *load) write(ctx context.Context) error {
	ticks := time.NewTicker(writeInterval)
	defer ticks.Stop()
	for {
		select {
		case <-l.stop:
			return nil
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
		i := int(l.next.Add(1))
		// Spread over the orders, rollbacks included.
		orderID := (i+i/rollbackEvery)%orders + 1
		err := l.service.change(ctx, orderID, i%rollbackEvery == 0)
		switch {
		case errors.Is(err, errDeclined):
			l.rolledBack.Add(1)
		case err != nil:
			return fmt.Errorf("transaction %d on order %d: %w", i, orderID, err)
		}
	}
}
