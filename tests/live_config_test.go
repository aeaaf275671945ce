package tests

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// What concerns the WAL is checked as all else is, also where only polling is
// asked for.
func TestLiveConsumerConfigIsChecked(t *testing.T) {
	t.Parallel()

	cases := map[string]struct {
		config outbox.ConsumerConfig
		says   []string
	}{
		"unknown mode":                      {outbox.ConsumerConfig{Mode: "sometimes"}, []string{"Mode", `"auto"`, `"poll"`, `"wal"`, `is "sometimes"`}},
		"mode in another case":              {outbox.ConsumerConfig{Mode: "WAL"}, []string{"Mode", `is "WAL"`}},
		"few live bytes":                    {outbox.ConsumerConfig{LiveBytes: outbox.MinLiveBytes - 1}, []string{"LiveBytes", "at least 65536", "is 65535"}},
		"negative live bytes":               {outbox.ConsumerConfig{LiveBytes: -1}, []string{"LiveBytes", "is -1"}},
		"few live bytes, which nobody uses": {outbox.ConsumerConfig{Mode: outbox.ModePoll, LiveBytes: 1}, []string{"LiveBytes", "is 1"}},
		"little WAL":                        {outbox.ConsumerConfig{MaxSlotWAL: outbox.MinMaxSlotWAL - 1}, []string{"MaxSlotWAL", "at least 16777216", "is 16777215"}},
		"negative WAL":                      {outbox.ConsumerConfig{MaxSlotWAL: -1}, []string{"MaxSlotWAL", "is -1"}},
		"no connection beside the reserved": {outbox.ConsumerConfig{MaxConns: outbox.MinMaxConns - 1}, []string{"MaxConns", "at least 3", "is 2"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			consumer, err := outbox.NewConsumer(nil, c.config, nil)
			require.Nil(t, consumer)
			require.ErrorContains(t, err, "outbox: ConsumerConfig.")
			for _, text := range c.says {
				require.ErrorContains(t, err, text)
			}
		})
	}
}

// poolerWithoutReplication is a proxy that refuses replication connections the
// way PgBouncer did up to version 1.22, and lets all others pass. It returns the
// database's URL through it.
func poolerWithoutReplication(t *testing.T, server string) string {
	t.Helper()
	target, err := url.Parse(server)
	require.NoError(t, err)
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var running sync.WaitGroup
	t.Cleanup(func() {
		assert.NoError(t, listener.Close())
		running.Wait() // all clients have gone by now
	})
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if assert.NoError(t, err) {
				running.Go(func() {
					defer func() { _ = client.Close() }()
					servePooled(client, target.Host)
				})
			}
		}
	})
	through := *target
	through.Host = listener.Addr().String()
	return through.String()
}

// servePooled serves one connection of a pooler.
func servePooled(client net.Conn, target string) {
	hello, err := pgproto3.NewBackend(client, client).ReceiveStartupMessage()
	if err != nil {
		return
	}
	if startup, ok := hello.(*pgproto3.StartupMessage); ok && startup.Parameters["replication"] != "" {
		refusal, err := (&pgproto3.ErrorResponse{
			Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "08P01", Message: "unsupported startup parameter: replication",
		}).Encode(nil)
		if err == nil {
			_, _ = client.Write(refusal)
		}
		return
	}
	server, err := net.Dial("tcp", target) //nolint:noctx // ends with the client
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	first, err := hello.Encode(nil)
	if err != nil {
		return
	}
	if _, err := server.Write(first); err != nil {
		return
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(client, server)
		_ = client.Close()
	}()
	_, _ = io.Copy(server, client)
	_ = server.Close()
	<-ended
}

// walless is a way in which the WAL cannot be read: a fixture, the URL of the
// consumer, and what the reason must name, the remedy included.
type walless struct {
	f     *fixture
	url   string
	names []string
}

// consumerRole is the URL of a role that may consume, and no more.
func (f *fixture) consumerRole() string {
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	return f.urlAs(role)
}

// Somebody has to change something before the WAL can be read. Elsewhere that is
// told late, one thing after the other, or as another error ("must be
// superuser"), again and again. Here it is said once, with what to do, and
// messages are polled meanwhile; and who insists on the WAL is refused, with all
// of it at once. Field case F38.
func TestWALCannotBeRead(t *testing.T) {
	t.Parallel()

	replica := pgtest.Own(t, pgtest.Options{Settings: map[string]string{"wal_level": "replica"}})
	on := func(t *testing.T, server *pgtest.Server) *fixture { return fixtureAt(t, pgtest.DatabaseOn(t, server)) }
	publication := quoteIdentifier(oddSchema)
	level := []string{"wal_level", "found replica, want logical", "ALTER SYSTEM SET wal_level = logical", "restart"}
	for name, prepare := range map[string]func(t *testing.T) walless{
		"wal_level is replica": func(t *testing.T) walless {
			f := on(t, replica)
			return walless{f, f.url, level}
		},
		"no REPLICATION": func(t *testing.T) walless {
			f := newFixture(t)
			return walless{f, f.consumerRole(), []string{"no REPLICATION", "ALTER ROLE", "REPLICATION: as a superuser"}}
		},
		"wal_level is replica and no REPLICATION": func(t *testing.T) walless {
			f := on(t, replica)
			return walless{f, f.consumerRole(), append([]string{"no REPLICATION", "ALTER ROLE"}, level...)}
		},
		"no free slot": func(t *testing.T) walless {
			f := on(t, pgtest.Own(t, pgtest.Options{Settings: map[string]string{"max_replication_slots": "2"}}))
			f.exec("SELECT pg_create_physical_replication_slot('idle_' || n) FROM generate_series(1, 2) n")
			return walless{f, f.url, []string{
				"max_replication_slots", "2, with 2 in use", "ALTER SYSTEM SET max_replication_slots = 12", "drop a slot of pg_replication_slots",
			}}
		},
		"a pooler in between": func(t *testing.T) walless {
			f := newFixture(t)
			return walless{f, poolerWithoutReplication(t, f.url), []string{"unsupported startup parameter: replication", "pooler", "directly"}}
		},
		"no publication": func(t *testing.T) walless {
			f := newFixture(t)
			f.execRaw("DROP PUBLICATION " + publication)
			return walless{f, f.url, []string{"publication " + publication, "missing", publicationSQL(t, oddSchema)[:60]}}
		},
		"publication for another table": func(t *testing.T) walless {
			f := newFixture(t)
			f.exec("ALTER PUBLICATION " + publication + " SET TABLE outbox.cursors")
			return walless{f, f.url, []string{"publication " + publication, "without table messages", "ALTER PUBLICATION " + publication + " ADD TABLE"}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := prepare(t)
			db, err := pgxpool.ParseConfig(w.url)
			require.NoError(t, err)
			publisher := w.f.publisher(outbox.PublisherConfig{})

			consumer, book := w.f.loggedConsumer(db, readsWAL)
			_, messages := w.f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			begin := time.Now()
			book.await(t, 1, "Messages are polled")
			said := time.Since(begin)
			status := consumer.Status()
			require.Equal(t, outbox.SourceTable, status.Source)
			for _, text := range w.names {
				assert.Contains(t, status.Reason, text)
				assert.Contains(t, book.find("Messages are polled")[0].Text, text)
			}
			require.NoError(t, status.Ready())
			for _, msg := range newMessages(20) {
				require.NoError(t, publisher.Publish("topic", msg))
				requireNext(t, messages, msg)
			}

			insisting, err := outbox.NewConsumer(db, outbox.ConsumerConfig{Schema: oddSchema, Mode: outbox.ModeWAL}, nil)
			require.NoError(t, err)
			subscriber, err := outbox.NewSubscriber(insisting, outbox.SubscriberConfig{ConsumerGroup: "insisting"}, nil)
			require.NoError(t, err)
			begin = time.Now()
			refused, err := subscriber.Subscribe(t.Context(), "topic")
			took := time.Since(begin)
			require.Nil(t, refused)
			require.ErrorIs(t, err, outbox.ErrNoWAL)
			for _, text := range w.names {
				assert.ErrorContains(t, err, text)
			}
			require.Less(t, took, maxDelay)
			require.Empty(t, insisting.Status().Subscriptions)
			require.NoError(t, insisting.Close())

			require.Len(t, book.find("Messages are polled"), 1)
			require.Empty(t, book.errors())
			require.NoError(t, consumer.Close())
			require.Eventually(t, func() bool {
				return w.f.number(`SELECT count(*)::int FROM pg_stat_activity
					WHERE datname = current_database() AND application_name = 'watermill-outbox'`) == 0
			}, waitFor, 5*time.Millisecond, "sessions are left")
			t.Logf("said after %s, refused after %s: %v", said, took, err)
		})
	}
}

// TestLiveConsumers tries what befalls whole consumers, one test after the
// other, since each looks at the whole server.
func TestLiveConsumers(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{})
	t.Run("database with an odd name", func(t *testing.T) { testLiveWithOddNames(t, server) })
	for _, test := range []struct {
		name string
		run  func(t *testing.T, f *fixture)
	}{
		{"a group that fails", testFailingGroupStopsNoOther},
		{"subscriptions cancelled at random", testLiveSubscribeCancelled},
		{"nothing flows", testLiveReadiness},
		{"replication connections are cut", testReplicationConnectionsAreCut},
		{"a statement stalls", testBarrierStalls},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, fixtureAt(t, pgtest.DatabaseOn(t, server))) })
	}
}

// Names of slots take little, those of databases, schemas and publications
// nearly everything. Field case F39.
func testLiveWithOddNames(t *testing.T, server *pgtest.Server) {
	admin := pgtest.Pool(t, server.URL())
	_, err := admin.Exec(t.Context(), `CREATE DATABASE "My-DB ä"`)
	require.NoError(t, err)
	f := fixtureAt(t, server.URLFor("My-DB ä"))
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeWAL })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM pg_replication_slots WHERE database = current_database() AND slot_name = $1", consumer.Status().Slot))
	sent := newMessages(10)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	requireNext(t, messages, sent...)
	awaitLive(t, consumer)
	t.Logf("live in %q, schema %q, slot %s", "My-DB ä", oddSchema, consumer.Status().Slot)
}

// One of several groups on a shared stream fails with every message, and takes
// the others with it, or the WAL grows for it. Here they share a stream and
// nothing else. Field case F41.
func testFailingGroupStopsNoOther(t *testing.T, f *fixture) {
	const n = 1000
	consumer := f.consumer(readsWAL)
	subscribers := map[string]*outbox.Subscriber{}
	for _, group := range []string{"good", "nacks", "panics"} {
		var err error
		subscribers[group], err = outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: group, CloseTimeout: -1}, nil)
		require.NoError(t, err)
	}
	arrived := make(chan *message.Message, n)
	var failures atomic.Int64
	stop := startRouter(t, func(r *message.Router) {
		r.AddConsumerHandler("good", "topic", subscribers["good"], func(msg *message.Message) error {
			arrived <- msg
			return nil
		})
		r.AddConsumerHandler("nacks", "topic", subscribers["nacks"], func(*message.Message) error {
			failures.Add(1)
			return errors.New("never")
		})
		r.AddConsumerHandler("panics", "topic", subscribers["panics"], func(*message.Message) error {
			failures.Add(1)
			panic("never")
		})
	})
	defer stop()
	awaitLive(t, consumer)
	publisher := f.publisher(outbox.PublisherConfig{})
	begin := time.Now()
	sent := newMessages(n)
	for i := 0; i < n; i += 10 {
		require.NoError(t, publisher.Publish("topic", sent[i:i+10]...))
	}
	for i := range sent {
		require.Equal(t, sent[i].UUID, await(t, arrived).UUID)
	}
	took := time.Since(begin)
	require.Less(t, took, 10*time.Second)
	require.GreaterOrEqual(t, failures.Load(), int64(2), "nobody failed: the test proves nothing")
	awaitStatus(t, consumer, waitFor, func(s outbox.Status) bool {
		good := s.Subscriptions[0] // by topic and group
		return s.Source == outbox.SourceWAL && good.ConsumerGroup == "good" && good.Source == outbox.SourceWAL && good.Err == nil
	})
	f.writeWAL(20)
	require.Eventually(t, func() bool {
		f.exec("CHECKPOINT")
		f.writeWAL(0)
		return f.slotState(t).retained < 4<<20
	}, waitFor, 50*time.Millisecond, "WAL is kept")
	t.Logf("%d messages in %s, beside %d failures", n, took, failures.Load())
}

// Contexts that end at a random moment of Subscribe, while the stream is opened,
// attached to, and left. Field case F50.
func testLiveSubscribeCancelled(t *testing.T, f *fixture) {
	const workers, each = 8, 25
	require.Zero(t, f.sessions(t).All)
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeWAL })
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{CloseTimeout: -1}, nil)
	require.NoError(t, err)
	p := f.probe(t, consumer)
	var subscribed, cancelled, live atomic.Int64
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(worker), uint64(time.Now().UnixNano())))
			for i := range each {
				topic := "topic " + string(rune('a'+random.IntN(5)))
				limit := 20 * time.Millisecond
				switch i % 5 {
				case 0:
					limit = 1500 * time.Millisecond // long enough to become live
				case 1, 2:
					limit = 4 * time.Millisecond // hardly long enough to come through
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.Int64N(int64(limit))))
				messages, err := subscriber.Subscribe(ctx, topic)
				if err == nil {
					subscribed.Add(1)
					for range messages {
						assert.Fail(t, "nothing was published there")
					}
				} else {
					cancelled.Add(1)
				}
				for _, sub := range consumer.Status().Subscriptions {
					if sub.Topic != "probe" && sub.Source == outbox.SourceWAL {
						live.Add(1)
						break
					}
				}
				cancel()
			}
		})
	}
	wg.Wait()
	require.Positive(t, subscribed.Load(), "no call came through: the test proves nothing")
	require.Positive(t, cancelled.Load(), "no call was cancelled: the test proves nothing")
	require.Positive(t, live.Load(), "nobody was live: the test proves nothing")
	require.Len(t, consumer.Status().Subscriptions, 1, "the probe's")
	require.Eventually(t, func() bool { return f.sessions(t).InTransaction == 0 }, waitFor, 5*time.Millisecond, "a session is left in a transaction")
	awaitLive(t, consumer)
	n, slowest := p.end()
	require.LessOrEqual(t, f.sessions(t).All, outbox.DefaultMaxConns)
	require.NoError(t, consumer.Close())
	require.Eventually(t, func() bool { return f.sessions(t).All == 0 }, waitFor, 5*time.Millisecond, "sessions are left")
	f.awaitNoSlot(t, 5*time.Second)
	t.Logf("%d subscriptions, %d calls cancelled, others seen live %d times; probe: %d messages, latest %s",
		subscribed.Load(), cancelled.Load(), live.Load(), n, slowest)
}

// The process is up, the slot is active, nothing is an error, and no message has
// come for days. When the stream is lost the reason is there to be read; when
// messages can be had in neither way, the consumer is not ready; and all is well
// after the repair. For a publication that is dropped see
// TestLivePublicationIsChanged. Field case F100.
func testLiveReadiness(t *testing.T, f *fixture) {
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	f.replicates(role)
	db, err := pgxpool.ParseConfig(f.urlAs(role))
	require.NoError(t, err)
	consumer, book := f.loggedConsumer(db, func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeWAL })
	p := f.probe(t, consumer)
	awaitLive(t, consumer)
	terminate := func() {
		t.Helper()
		require.Equal(t, 1, f.number("SELECT count(pg_terminate_backend(active_pid))::int FROM pg_replication_slots WHERE slot_name = $1", consumer.Status().Slot))
	}
	terminate()
	require.Contains(t, book.await(t, 1, "Messages are polled")[0].Text, "shut down")
	awaitLive(t, consumer)
	terminated := p.worst()
	require.NoError(t, consumer.Status().Ready())

	privilege := quoteIdentifier(oddSchema) + ".messages"
	f.execRaw("REVOKE SELECT ON " + privilege + " FROM " + quoteIdentifier(role))
	p.worst() // the stream needs no privilege on the table
	terminate()
	begin := time.Now()
	require.Eventually(t, func() bool { return consumer.Status().Ready() != nil }, 15*time.Second, time.Millisecond, "ready, although nothing flows")
	unready := time.Since(begin)
	require.ErrorContains(t, consumer.Status().Ready(), "permission denied")
	require.ErrorContains(t, consumer.Status().Ready(), `topic "probe"`)
	f.execRaw("GRANT SELECT ON " + privilege + " TO " + quoteIdentifier(role))
	begin = time.Now()
	require.Eventually(t, func() bool { return consumer.Status().Ready() == nil }, waitFor, time.Millisecond)
	ready := time.Since(begin)
	awaitLive(t, consumer)
	p.stop()
	p.awaitAll()
	t.Logf("latest %s after the sender's end; not ready after %s without SELECT, ready %s after the repair", terminated, unready, ready)
}

// The server, or what is between, lets no replication connection in for a while.
// A loop without a pause keeps it from coming up. Field case F47.
func testReplicationConnectionsAreCut(t *testing.T, f *fixture) {
	proxy := f.proxy(t)
	db, err := pgxpool.ParseConfig(proxy.URL(f.url))
	require.NoError(t, err)
	consumer := f.consumerOn(db, readsWAL)
	p := f.probe(t, consumer)
	awaitLive(t, consumer)
	var attempts atomic.Int64
	proxy.OnClient(func(m pgtest.Message) pgtest.Action {
		if m.Type == 0 && bytes.Contains(m.Body, []byte("replication\x00database\x00")) {
			attempts.Add(1)
			return pgtest.Cut
		}
		return pgtest.Forward
	})
	proxy.CutAll()
	begin := time.Now()
	awaitPolling(t, consumer, "connection lost")
	require.Eventually(t, func() bool { return attempts.Load() >= 3 }, waitFor, time.Millisecond)
	took := time.Since(begin)
	require.Greater(t, took, time.Second, "three attempts at once")
	require.Less(t, took, 10*time.Second, "hardly any attempts")
	polled := p.awaitAll()
	proxy.OnClient(nil)
	awaitLive(t, consumer)
	p.stop()
	p.awaitAll()
	t.Logf("%d attempts in %s, polled meanwhile, latest %s", attempts.Load(), took, polled)
}

// A session holds what the stream's statements need, they wait for it without a
// limit, and the stream stands still. It is given up after a while, and messages
// are polled. Field case F49.
func testBarrierStalls(t *testing.T, f *fixture) {
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode, c.QueryTimeout = outbox.ModeAuto, 5*time.Second })
	p := f.probe(t, consumer)
	awaitLive(t, consumer)
	late := &lateTransaction{f: f, t: t}
	late.begin()
	late.exec("LOCK TABLE pg_catalog.pg_publication IN ACCESS EXCLUSIVE MODE")
	begin := time.Now()
	awaitStatus(t, consumer, waitFor, func(s outbox.Status) bool { return s.Source == outbox.SourceTable && s.Reason != "" })
	noticed := time.Since(begin)
	reason := consumer.Status().Reason
	stalled := p.worst()
	polled := p.count()
	require.Eventually(t, func() bool { return p.count() > polled+20 }, waitFor, time.Millisecond, "nothing is polled")
	late.commit()
	awaitLive(t, consumer)
	n, _ := p.end()
	t.Logf("given up after %s (%s); %d messages, latest %s", noticed, reason, n, stalled)
}
