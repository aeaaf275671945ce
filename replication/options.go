package replication

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

const (
	// DefaultStatusInterval is the longest default of Options.StatusInterval.
	DefaultStatusInterval = 10 * time.Second

	// MinStatusInterval is the least StatusInterval.
	MinStatusInterval = 10 * time.Millisecond

	// DefaultReceiveTimeout is the default of Options.ReceiveTimeout.
	DefaultReceiveTimeout = time.Minute

	// MaxReadPause is the most ReadPause.
	MaxReadPause = 100 * time.Millisecond

	// DefaultCloseTimeout is the default of Options.CloseTimeout.
	DefaultCloseTimeout = time.Second

	// DefaultQueueBytes is the default of Options.QueueBytes.
	DefaultQueueBytes = 16 << 20

	// MinQueueBytes is the least QueueBytes.
	MinQueueBytes = 1 << 10

	// writeTimeout bounds the sending of a status, which is some 40 bytes. The
	// server reads them even while it is held back.
	writeTimeout = 10 * time.Second
)

// Options say what is streamed and how. Only Publications is required.
type Options struct {
	// Publications are the publications whose changes are sent. At least one.
	Publications []string

	// Binary asks for values in binary format, which is less work for both
	// sides; types that have none come as text. Defaults to text. PostgreSQL 14
	// and later.
	Binary bool

	// Messages asks for the logical messages of the database, which belong to
	// no publication. Defaults to none. PostgreSQL 14 and later.
	Messages bool

	// ProtoVersion is the version of pgoutput's protocol, 1 to 4. What this
	// package asks for looks the same in all of them. Defaults to 1.
	ProtoVersion int

	// StatusInterval is how often a status is sent when nothing else gives
	// occasion to. Too high, and a server whose data is not read for a while
	// cuts the connection: it must be at most half of the server's
	// wal_sender_timeout, and of ReceiveTimeout. Too low is work for both
	// sides. At least MinStatusInterval. Defaults to a quarter of these
	// time-outs, at most DefaultStatusInterval.
	StatusInterval time.Duration

	// ReceiveTimeout is how long the server may say nothing. After half of it
	// the server is asked for a sign of life; after all of it the stream ends
	// with ErrServerSilent. Too low ends streams while the server works on a
	// large transaction that has nothing for it. While a full queue keeps the
	// stream from reading, the time does not count. Negative is no limit.
	// Defaults to DefaultReceiveTimeout.
	ReceiveTimeout time.Duration

	// ReadPause is a pause before each read that follows another, at most
	// MaxReadPause. It lets more come together in the meantime, so that one
	// read gets it: more throughput for the server and for us, for so much more
	// latency under load. The first event after a quiet time comes at once.
	// Defaults to none.
	ReadPause time.Duration

	// ReadPauseRate is how many messages of the stream must come in a second
	// before ReadPause applies, so that it costs no latency while little comes; a
	// transaction of one row is three messages. Negative values are refused.
	// Defaults to 0, always.
	ReadPauseRate int

	// CloseTimeout bounds the goodbye at the end of a stream: the last status
	// is sent, and the server is waited for to hang up, by which it has let go
	// of the slot. Defaults to DefaultCloseTimeout.
	CloseTimeout time.Duration

	// QueueBytes is how many bytes of events a Reader holds that have not been
	// taken, plus one message. Too low makes the owner of the connection and
	// the consumer wait for one another. At least MinQueueBytes. It means
	// nothing to Start. Defaults to DefaultQueueBytes.
	QueueBytes int

	// StallTimeout is how long a Reader's queue may be full at a stretch before
	// the stream ends with ErrStalled, and the server is relieved. Defaults to
	// no limit.
	StallTimeout time.Duration
}

// withDefaults returns the options filled in for a server whose
// wal_sender_timeout, 0 for none, is given, or an error that names the option
// and its bound.
func (o Options) withDefaults(senderTimeout time.Duration) (Options, error) {
	o.ProtoVersion = cmp.Or(o.ProtoVersion, 1)
	o.ReceiveTimeout = cmp.Or(o.ReceiveTimeout, DefaultReceiveTimeout)
	o.CloseTimeout = cmp.Or(o.CloseTimeout, DefaultCloseTimeout)
	o.QueueBytes = cmp.Or(o.QueueBytes, DefaultQueueBytes)
	interval := DefaultStatusInterval
	for _, timeout := range []time.Duration{senderTimeout, o.ReceiveTimeout} {
		if timeout > 0 {
			interval = min(interval, max(timeout/4, MinStatusInterval))
		}
	}
	o.StatusInterval = cmp.Or(o.StatusInterval, interval)

	switch {
	case len(o.Publications) == 0:
		return o, errors.New("replication: Publications is empty")
	case o.ProtoVersion < 1 || o.ProtoVersion > 4:
		return o, fmt.Errorf("replication: ProtoVersion is %d, it must be 1 to 4", o.ProtoVersion)
	case o.StatusInterval < MinStatusInterval:
		return o, fmt.Errorf("replication: StatusInterval is %s, it must be at least %s", o.StatusInterval, MinStatusInterval)
	case senderTimeout > 0 && o.StatusInterval > senderTimeout/2:
		return o, fmt.Errorf("replication: StatusInterval is %s, it must be at most half of the server's wal_sender_timeout of %s", o.StatusInterval, senderTimeout)
	case o.ReceiveTimeout > 0 && o.StatusInterval > o.ReceiveTimeout/2:
		return o, fmt.Errorf("replication: StatusInterval is %s, it must be at most half of ReceiveTimeout, %s", o.StatusInterval, o.ReceiveTimeout)
	case o.ReadPause < 0 || o.ReadPause > MaxReadPause:
		return o, fmt.Errorf("replication: ReadPause is %s, it must be between 0 and %s", o.ReadPause, MaxReadPause)
	case o.ReadPauseRate < 0:
		return o, fmt.Errorf("replication: ReadPauseRate is %d, it must not be negative", o.ReadPauseRate)
	case o.CloseTimeout < 0:
		return o, fmt.Errorf("replication: CloseTimeout is %s, it must not be negative", o.CloseTimeout)
	case o.QueueBytes < MinQueueBytes:
		return o, fmt.Errorf("replication: QueueBytes is %d, it must be at least %d", o.QueueBytes, MinQueueBytes)
	case o.StallTimeout < 0:
		return o, fmt.Errorf("replication: StallTimeout is %s, it must not be negative", o.StallTimeout)
	}
	for _, name := range o.Publications {
		if err := CheckPublicationName(name); err != nil {
			return o, err
		}
	}
	return o, nil
}

// pluginArguments are the options for pgoutput, as the replication grammar takes
// them: values in single quotes, doubled inside, without escapes.
func (o Options) pluginArguments() []string {
	quoted := make([]string, len(o.Publications))
	for i, name := range o.Publications {
		quoted[i] = `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
	}
	names := strings.ReplaceAll(strings.Join(quoted, ","), `'`, `''`)
	arguments := []string{
		fmt.Sprintf("proto_version '%d'", o.ProtoVersion),
		fmt.Sprintf("publication_names '%s'", names),
	}
	// Versions before 14 do not know these.
	if o.Binary {
		arguments = append(arguments, "binary 'true'")
	}
	if o.Messages {
		arguments = append(arguments, "messages 'true'")
	}
	return arguments
}

// senderTimeout returns the server's wal_sender_timeout for this session, 0 for
// none.
func (c *Conn) senderTimeout(ctx context.Context) (time.Duration, error) {
	rows, err := c.query(ctx, "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'")
	if err != nil {
		return 0, err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return 0, ErrProtocol
	}
	milliseconds, err := strconv.ParseInt(rows[0][0], 10, 32)
	return time.Duration(milliseconds) * time.Millisecond, err
}

// checkPublications returns ErrPublicationMissing if there is not each of them.
func (c *Conn) checkPublications(ctx context.Context, names []string) error {
	const op = "stream publication"
	rows, err := c.query(ctx, "SELECT pubname FROM pg_catalog.pg_publication")
	if err != nil {
		return wrap(op, strings.Join(names, ", "), aboutConnection, err)
	}
	there := map[string]bool{}
	for _, row := range rows {
		there[row[0]] = true
	}
	for _, name := range names {
		if !there[name] {
			return &Error{Op: op, Name: name, Reason: ErrPublicationMissing}
		}
	}
	return nil
}
