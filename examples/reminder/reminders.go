package main

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
)

// lastInvoice is the one whose reminder is due last.
const lastInvoice = "1"

// reminders handles the reminders and keeps book of them.
type reminders struct {
	db  *pgxpool.Pool
	out io.Writer
	// last is closed when the reminder of lastInvoice has come.
	last chan struct{}

	// scheduled and rolledBack belong to whoever schedules.
	scheduled, rolledBack int

	mu        sync.Mutex
	delivered map[string]int
	early     int
	reminded  int
	paid      int
}

func newReminders(db *pgxpool.Pool, out io.Writer) *reminders {
	return &reminders{db: db, out: out, last: make(chan struct{}), delivered: map[string]int{}}
}

// handle is the Router's handler.
func (r *reminders) handle(msg *message.Message) error {
	// What counts is the state now, and not that of the day when the reminder was
	// scheduled: an invoice may have been paid, or changed.
	var paid bool
	var now time.Time
	err := r.db.QueryRow(msg.Context(), "SELECT paid, clock_timestamp() FROM invoices WHERE id = $1::text::int", string(msg.Payload)).
		Scan(&paid, &now)
	if err != nil {
		return err
	}
	due, err := time.Parse(time.RFC3339, msg.Metadata.Get(delay.DelayedUntilKey))
	if err != nil {
		return err
	}
	r.note(string(msg.Payload), paid, now.Sub(due))
	return nil
}

// note notes a reminder that came so long after it was due.
func (r *reminders) note(invoice string, paid bool, after time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.delivered[invoice]++
	if after < 0 {
		r.early++
	}
	if paid {
		r.paid++
		fmt.Fprintf(r.out, "  invoice %s is due and has been paid: nothing to do (%dms after its time)\n", invoice, after.Milliseconds())
	} else {
		r.reminded++
		fmt.Fprintf(r.out, "  invoice %s is due: reminder sent (%dms after its time)\n", invoice, after.Milliseconds())
	}
	if invoice == lastInvoice {
		select {
		case <-r.last:
		default:
			close(r.last)
		}
	}
}

// result may be called once the last reminder has been delivered.
func (r *reminders) result() result {
	r.mu.Lock()
	defer r.mu.Unlock()
	res := result{
		scheduled: r.scheduled, rolledBack: r.rolledBack, early: r.early, reminded: r.reminded, alreadyPaid: r.paid,
		invoices: len(r.delivered),
	}
	for _, n := range r.delivered {
		res.delivered += n
	}
	return res
}

// result is the outcome.
type result struct {
	scheduled, rolledBack, delivered, early, reminded, alreadyPaid int
	// invoices counts the different ones among the delivered.
	invoices int
}

// ok reports whether each scheduled reminder was delivered once and not early, and
// none of the transaction that was rolled back.
func (r result) ok() bool {
	return r.delivered == r.scheduled && r.invoices == r.scheduled && r.early == 0 && r.reminded+r.alreadyPaid == r.delivered
}

// String is the last line that the program prints.
func (r result) String() string {
	return fmt.Sprintf("scheduled=%d rolled_back=%d delivered=%d early=%d reminded=%d already_paid=%d",
		r.scheduled, r.rolledBack, r.delivered, r.early, r.reminded, r.alreadyPaid)
}
