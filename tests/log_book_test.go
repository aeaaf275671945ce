package tests

import (
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// logBook is a logger that keeps what it is told, so that a test can wait for
// it. Safe for concurrent use.
type logBook struct {
	shared *logEntries
	fields watermill.LogFields
}

type logEntries struct {
	mu   sync.Mutex
	list []logEntry
}

type logEntry struct {
	Level  string
	Text   string
	Err    error
	Fields watermill.LogFields
}

func newLogBook() *logBook { return &logBook{shared: &logEntries{}} }

func (b *logBook) add(level, text string, err error, fields watermill.LogFields) {
	all := maps.Clone(b.fields)
	if all == nil {
		all = watermill.LogFields{}
	}
	maps.Copy(all, fields)
	b.shared.mu.Lock()
	defer b.shared.mu.Unlock()
	b.shared.list = append(b.shared.list, logEntry{level, text, err, all})
}

func (b *logBook) Error(text string, err error, fields watermill.LogFields) {
	b.add("error", text, err, fields)
}

func (b *logBook) Info(text string, fields watermill.LogFields) { b.add("info", text, nil, fields) }

func (b *logBook) Debug(text string, fields watermill.LogFields) { b.add("debug", text, nil, fields) }

func (b *logBook) Trace(text string, fields watermill.LogFields) { b.add("trace", text, nil, fields) }

func (b *logBook) With(fields watermill.LogFields) watermill.LoggerAdapter {
	all := maps.Clone(b.fields)
	if all == nil {
		all = watermill.LogFields{}
	}
	maps.Copy(all, fields)
	return &logBook{shared: b.shared, fields: all}
}

// find returns the entries whose text begins with this one.
func (b *logBook) find(text string) []logEntry {
	b.shared.mu.Lock()
	defer b.shared.mu.Unlock()
	var found []logEntry
	for _, entry := range b.shared.list {
		if strings.HasPrefix(entry.Text, text) {
			found = append(found, entry)
		}
	}
	return found
}

// errors returns the entries of level error.
func (b *logBook) errors() []logEntry {
	b.shared.mu.Lock()
	defer b.shared.mu.Unlock()
	var found []logEntry
	for _, entry := range b.shared.list {
		if entry.Level == "error" {
			found = append(found, entry)
		}
	}
	return found
}

// await waits for n entries whose text begins with this one and returns them.
func (b *logBook) await(t testing.TB, n int, text string) []logEntry {
	t.Helper()
	require.Eventually(t, func() bool { return len(b.find(text)) >= n }, waitFor, 2*time.Millisecond, "nothing was logged like %q", text)
	return b.find(text)
}

// loggedConsumer is consumerOn that logs into a book.
func (f *fixture) loggedConsumer(db *pgxpool.Config, change func(*outbox.ConsumerConfig)) (*outbox.Consumer, *logBook) {
	f.t.Helper()
	config := outbox.ConsumerConfig{
		Schema: oddSchema, PollInterval: 10 * time.Millisecond, CheckpointInterval: 20 * time.Millisecond, Mode: testMode,
	}
	if change != nil {
		change(&config)
	}
	book := newLogBook()
	consumer, err := outbox.NewConsumer(db, config, book)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, consumer.Close()) })
	return consumer, book
}
