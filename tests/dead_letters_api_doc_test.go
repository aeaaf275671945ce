package tests

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// What docs/dead-letters.md shows, block by block.

func showKeepError(router *message.Router) {
	router.AddMiddleware(outbox.KeepError) // before all others
}

func showList(ctx context.Context, pool *pgxpool.Pool, failures map[string][]int64) (*outbox.DeadLetters, error) {
	letters, err := outbox.NewDeadLetters(pool, outbox.DeadLettersConfig{Actor: "ana@example.com"})
	if err != nil {
		return nil, err
	}
	page, err := letters.List(ctx, outbox.DeadLetterFilter{ConsumerGroup: "invoices", Topic: "orders"}, outbox.DeadLetterPage{})
	for _, letter := range page {
		failures[letter.Error] = append(failures[letter.Error], letter.ID)
	}
	return letters, err
}

func showRequeue(ctx context.Context, letters *outbox.DeadLetters, id int64) (_ int, err error) {
	err = letters.Requeue(ctx, id, "customer is in the database now")
	if err != nil {
		return 0, err
	}
	n, err := letters.RequeueAll(ctx,
		outbox.DeadLetterFilter{ConsumerGroup: "invoices", ErrorContains: "connection refused"},
		outbox.RequeueOptions{PerSecond: 50, Reason: "INC-17"})
	return n, err
}

func showDiscard(ctx context.Context, letters *outbox.DeadLetters, id int64) (n int, err error) {
	err = letters.Discard(ctx, id, "test data")
	if err != nil {
		return 0, err
	}
	n, err = letters.DiscardAll(ctx, outbox.DeadLetterFilter{Topic: "orders", DiedBefore: time.Now().AddDate(0, -3, 0)}, "older than three months")
	return n, err
}

func showBury(ctx context.Context, letters *outbox.DeadLetters, delivery outbox.Delivery) (err error) {
	err = letters.Bury(ctx, "invoices", "orders", delivery.Era, delivery.ID, "INC-17: no such customer")
	return err
}

// The SQL of the manual runs and the code does what it says.
func TestDeadLettersManual(t *testing.T) {
	t.Parallel()

	f := &fixture{t: t, url: pgtest.Database(t)}
	f.pool = pgtest.Pool(t, f.url)
	require.NoError(t, schema.Migrate(t.Context(), f.pool, schema.Config{}))
	insert := func(uuid, failure, age string) (id int64) {
		require.NoError(t, f.pool.QueryRow(t.Context(), `INSERT INTO outbox.dead_letters
				(consumer_group, topic, uuid, payload, origin_era, origin_id, created_at, attempts, error, died_at)
			SELECT 'invoices', 'orders', $1, 'payload', outbox.era(), 1000000 + count(*), now(), 5, $2, now() - $3::text::interval
			FROM outbox.dead_letters RETURNING id`, uuid, failure, age).Scan(&id))
		return id
	}
	one, other := insert("one", "no such customer", "0"), insert("other", "no such customer", "0")
	insert("refused", "dial: connection refused", "0")
	insert("old", "no such customer", "6 months")

	manual, err := os.ReadFile("../docs/dead-letters.md")
	require.NoError(t, err)
	for _, block := range codeBlocks(t, string(manual), "sql") {
		_, err := f.pool.Exec(t.Context(), block)
		require.NoError(t, err, block)
	}

	failures := map[string][]int64{}
	letters, err := showList(t.Context(), f.pool, failures)
	require.NoError(t, err)
	require.Len(t, failures, 2)
	n, err := showRequeue(t.Context(), letters, one)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	n, err = showDiscard(t.Context(), letters, other)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.ErrorIs(t, showBury(t.Context(), letters, outbox.Delivery{Era: 1, ID: 1}), outbox.ErrMessageNotFound)
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	showKeepError(router)
	left, err := letters.Count(t.Context(), outbox.DeadLetterFilter{})
	require.NoError(t, err)
	require.Zero(t, left)
}

// Each line of Go in the manual is one of this file.
func TestDeadLettersManualShowsThisCode(t *testing.T) {
	t.Parallel()

	source, err := os.ReadFile("dead_letters_api_doc_test.go")
	require.NoError(t, err)
	manual, err := os.ReadFile("../docs/dead-letters.md")
	require.NoError(t, err)
	lines := map[string]bool{}
	for line := range strings.Lines(string(source)) {
		lines[strings.TrimSpace(line)] = true
	}
	for _, block := range codeBlocks(t, string(manual), "go") {
		for line := range strings.Lines(block) {
			require.True(t, lines[strings.TrimSpace(line)], line)
		}
	}
}

// codeBlocks returns the blocks of a language in a text in Markdown.
func codeBlocks(t testing.TB, text, language string) []string {
	t.Helper()
	var blocks []string
	for _, rest := range strings.Split(text, "```"+language+"\n")[1:] {
		block, _, closed := strings.Cut(rest, "```")
		require.True(t, closed)
		blocks = append(blocks, block)
	}
	require.NotEmpty(t, blocks)
	return blocks
}
