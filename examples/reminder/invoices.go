package main

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

// topic is where the reminders go.
const topic = "invoices.reminders"

// invoices are those that are written. Watermill's metadata hold the time in whole
// seconds, so a reminder may be due up to a second sooner than this.
var invoices = []struct {
	id       int
	remindIn time.Duration
	declined bool
}{
	{id: 1, remindIn: 4 * time.Second},
	{id: 2, remindIn: 2 * time.Second},
	{id: 3, remindIn: 3 * time.Second},
	{id: 4, remindIn: 2 * time.Second, declined: true},
}

// paidInvoice is paid before its reminder is due.
const paidInvoice = 3

// errDeclined is the business reason to roll a transaction back.
var errDeclined = errors.New("customer declined")

// invoiceService writes invoices and schedules their reminders.
type invoiceService struct {
	db        *pgxpool.Pool
	publisher message.Publisher
}

func (s *invoiceService) createTable(ctx context.Context) error {
	_, err := s.db.Exec(ctx, "CREATE TABLE invoices (id int PRIMARY KEY, paid boolean NOT NULL DEFAULT false)")
	return err
}

// write writes an invoice and schedules its reminder, both or neither.
func (s *invoiceService) write(ctx context.Context, id int, remindIn time.Duration, declined bool) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO invoices (id) VALUES ($1)", id); err != nil {
			return err
		}
		// The context carries the transaction that the message is written in, and
		// when it is to be delivered. A CQRS bus hands it on in the same way.
		ctx := delay.WithContext(outbox.ContextWithTx(ctx, tx), delay.For(remindIn))
		msg := message.NewMessageWithContext(ctx, watermill.NewUUID(), []byte(strconv.Itoa(id)))
		if err := s.publisher.Publish(topic, msg); err != nil {
			return err
		}
		if declined {
			return errDeclined // rolls back the invoice and the reminder
		}
		return nil
	})
}

// pay marks an invoice as paid. The reminder stays scheduled: its handler looks.
func (s *invoiceService) pay(ctx context.Context, id int) error {
	_, err := s.db.Exec(ctx, "UPDATE invoices SET paid = true WHERE id = $1", id)
	return err
}
