package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// maxConns is the most connections a scenario uses for itself.
	maxConns = 32
	// loadBatch is how many messages one transaction of load writes.
	loadBatch = 500_000

	// metadata is what every message carries: two entries, encoded.
	metadata = `{"correlation_id":"6f8c4f0e-9a0e-4a53-8f0c-2d3f0f7f2b11","event_name":"order.placed"}`
	// payload200 is the SQL of a payload of 200 bytes for message number i.
	payload200 = `substring(decode(repeat(md5(i::text), 13), 'hex') for 200)`
	// payload5MB is that of 5 MB which do not compress, the same for each i.
	payload5MB = `(SELECT string_agg(decode(md5(j::text), 'hex'), ''::bytea) FROM generate_series(1, 312500) AS j)`
)

// settings leave nothing to happen in the middle of a measurement: tables are
// vacuumed when they are loaded, and checkpoints are far apart.
var settings = map[string]string{
	"shared_buffers":     "1GB",
	"max_wal_size":       "8GB",
	"checkpoint_timeout": "30min",
	"autovacuum":         "off",
}

// servers are those started so far, by whether they are durable.
type servers map[bool]*pgtest.Server

func (s *servers) get(ctx context.Context, durable bool) (*pgtest.Server, error) {
	if server := (*s)[durable]; server != nil {
		return server, nil
	}
	server, err := pgtest.Open(ctx, pgtest.Options{Durable: durable, Settings: settings})
	if err != nil {
		return nil, err
	}
	if *s == nil {
		*s = servers{}
	}
	(*s)[durable] = server
	return server, nil
}

func (s *servers) stop() error {
	var err error
	for _, server := range *s {
		err = errors.Join(err, server.Stop())
	}
	return err
}

// database is an outbox in a database of its own.
type database struct {
	server *pgtest.Server
	name   string
	pool   *pgxpool.Pool
}

// database makes one, which the end of the scenario drops.
func (b *bench) database(ctx context.Context) (*database, error) {
	return b.databaseWith(ctx, schema.Config{})
}

// databaseWith makes one whose outbox has this configuration.
func (b *bench) databaseWith(ctx context.Context, c schema.Config) (*database, error) {
	server, err := b.server(ctx)
	if err != nil {
		return nil, err
	}
	d := &database{server: server, name: "outbox_bench_" + strings.ToLower(rand.Text()[:16])}
	if err := d.admin(ctx, "CREATE DATABASE "+pgx.Identifier{d.name}.Sanitize()); err != nil {
		return nil, err
	}
	b.databases = append(b.databases, d)
	config, err := d.config()
	if err != nil {
		return nil, err
	}
	config.MaxConns = maxConns
	if d.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, err
	}
	return d, schema.Migrate(ctx, d.pool, c)
}

// config is that of a pool.
func (d *database) config() (*pgxpool.Config, error) { return pgxpool.ParseConfig(d.url()) }

func (d *database) url() string { return d.server.URLFor(d.name) }

func (d *database) drop(ctx context.Context) error {
	if d.pool != nil {
		d.pool.Close()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	return d.admin(ctx, "DROP DATABASE "+pgx.Identifier{d.name}.Sanitize()+" WITH (FORCE)")
}

func (d *database) admin(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, d.server.URL())
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

// configure changes settings of the server (ALTER SYSTEM), which must be its own.
func (d *database) configure(ctx context.Context, changes ...string) error {
	for _, change := range changes {
		if err := d.admin(ctx, "ALTER SYSTEM "+change); err != nil {
			return err
		}
	}
	return d.admin(ctx, "SELECT pg_reload_conf()")
}

// load writes n messages into a topic, on the server itself.
func (d *database) load(ctx context.Context, topic string, n int, payload string) error {
	for first := 1; first <= n; first += loadBatch {
		_, err := d.pool.Exec(ctx, `INSERT INTO outbox.messages (topic, uuid, metadata, payload)
			SELECT $1::text, gen_random_uuid()::text, $2::text::json, `+payload+`
			FROM generate_series($3::bigint, $4::bigint) AS i`, topic, metadata, first, min(first+loadBatch-1, n))
		if err != nil {
			return fmt.Errorf("load: %w", err)
		}
	}
	return nil
}

// settle gives the planner its statistics, and saves whoever reads first the
// writing of hint bits.
func (d *database) settle(ctx context.Context) error {
	_, err := d.pool.Exec(ctx, "VACUUM (ANALYZE) outbox.messages")
	return err
}
