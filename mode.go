package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/live"
	"github.com/millrace/watermill-outbox/replication"
	"github.com/millrace/watermill-outbox/schema"
)

// Mode says where a Consumer finds new messages.
type Mode string

const (
	// ModeAuto reads the write-ahead log (WAL) whenever that is possible and
	// polls whenever it is not; what a person could change is logged once.
	ModeAuto Mode = "auto"
	// ModePoll asks the tables only. It needs no privilege, no setting and no
	// connection beyond those of the tables.
	ModePoll Mode = "poll"
	// ModeWAL is ModeAuto for those who want to know: Subscribe fails with
	// ErrNoWAL when the WAL cannot be read because of how server, role or
	// publication are set up. What passes by itself (a restart, a long
	// transaction) is bridged by polling here too, since messages must not wait
	// for it.
	ModeWAL Mode = "wal"
)

const (
	// DefaultLiveBytes bounds what was received from the WAL and not yet taken
	// by subscribers.
	DefaultLiveBytes = 64 << 20
	// MinLiveBytes is the least LiveBytes.
	MinLiveBytes = 64 << 10
	// DefaultMaxSlotWAL is how much WAL the replication slot may keep.
	DefaultMaxSlotWAL = 256 << 20
	// MinMaxSlotWAL is the least MaxSlotWAL: one segment of the log.
	MinMaxSlotWAL = 16 << 20

	// maxLag is how far the stream may be behind the server before subscribers
	// poll.
	maxLag = 500 * time.Millisecond
	// barrierConnect bounds the making of the barrier's connection.
	barrierConnect = 5 * time.Second
	// barrierTimeout bounds the statement that a message from the WAL waits for.
	barrierTimeout = 750 * time.Millisecond
	// liveTick is the longest time between two looks at how far the server is.
	liveTick = 100 * time.Millisecond
)

// newSource returns the Consumer's side of the WAL.
func (c *Consumer) newSource() *live.Source {
	return live.New(live.Config{
		Schema: c.config.Schema, Publication: schema.PublicationName(c.config.Schema),
		Connect: c.connectStream, Barrier: c.barrier, DB: c.db, Problems: c.walProblems,
		Tick: min(c.config.PollInterval, liveTick), Lag: maxLag,
		Bytes: c.config.LiveBytes, MaxPinned: c.config.MaxSlotWAL,
		Timeout: min(c.config.QueryTimeout, barrierTimeout), Failed: c.failed, Logger: c.logger,
	})
}

// connectStream opens a replication connection to where the pool leads.
func (c *Consumer) connectStream(ctx context.Context, options replication.ConnectOptions) (*replication.Conn, error) {
	config := c.barrier.config.ConnConfig.Copy()
	if c.prepare != nil {
		if err := c.prepare(ctx, config); err != nil {
			return nil, err
		}
	}
	// The extended protocol, which the usual checks use, is not spoken here.
	config.ValidateConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		results, err := conn.Exec(ctx, "SHOW transaction_read_only").ReadAll()
		if err != nil {
			return err
		}
		if len(results) == 1 && len(results[0].Rows) == 1 && string(results[0].Rows[0][0]) == "on" {
			return ErrReadOnly
		}
		return nil
	}
	c.gate.guard(&config.Config, false, false)
	conn, err := replication.Connect(ctx, &config.Config, options)
	if errors.Is(err, replication.ErrUnsupported) {
		return nil, fmt.Errorf("%w; if there is a pooler in between that knows no replication, connect the Consumer to the server directly, or set ModePoll", err)
	}
	return conn, err
}

// walProblems says what somebody has to change before the WAL can be read.
func (c *Consumer) walProblems(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, c.config.QueryTimeout)
	defer cancel()
	differences, err := schema.CheckLive(ctx, c.db, schema.Config{Name: c.config.Schema})
	if err != nil {
		return nil, err
	}
	problems := make([]string, len(differences))
	for i, d := range differences {
		problems[i] = d.String()
	}
	return problems, nil
}

// requireWAL is ModeWAL's promise: it returns an error that says what to change
// when the WAL could not be read.
func (c *Consumer) requireWAL(ctx context.Context) error {
	if c.config.Mode != ModeWAL || c.live.Status().Slot != "" {
		return nil // there is a stream, which may have taken the last slot
	}
	problems, err := c.walProblems(ctx)
	if err != nil {
		return err
	}
	if len(problems) > 0 {
		return fmt.Errorf("%w:\n%s", ErrNoWAL, strings.Join(problems, "\n"))
	}
	if c.walProven.Load() {
		return nil
	}
	conn, err := c.connectStream(ctx, replication.ConnectOptions{})
	if replication.IsMisconfigured(err) {
		return fmt.Errorf("%w: %w", ErrNoWAL, err)
	}
	if err != nil {
		return err
	}
	c.walProven.Store(true)
	_ = conn.Close(ctx) // it could be opened, which is what was asked
	return nil
}
