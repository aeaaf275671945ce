// Package database gets the examples a database. It has nothing to do with the
// outbox: an application opens its own pool instead.
package database

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
)

// closeTimeout bounds the dropping of the database.
const closeTimeout = 30 * time.Second

// Database is a new, empty database.
type Database struct {
	// Pool is connected to it.
	Pool *pgxpool.Pool

	server *pgtest.Server
	name   string
}

// Open creates a database, on the server named by OUTBOX_DATABASE_URL or else on
// a throw-away one, and opens a pool of at most maxConns connections.
func Open(ctx context.Context, maxConns int32) (_ *Database, err error) {
	server, err := pgtest.Open(ctx, pgtest.Options{})
	if err != nil {
		return nil, err
	}
	d := &Database{server: server, name: "outbox_example_" + strings.ToLower(rand.Text()[:12])}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := d.admin(ctx, "CREATE DATABASE "+d.name); err != nil {
		return nil, fmt.Errorf("create a database: %w", err)
	}
	config, err := pgxpool.ParseConfig(server.URLFor(d.name))
	if err != nil {
		return nil, err
	}
	config.MaxConns = maxConns
	d.Pool, err = pgxpool.NewWithConfig(ctx, config)
	return d, err
}

// String describes the database in a few words.
func (d *Database) String() string {
	if d.server.Owned() {
		return fmt.Sprintf("%s on a throw-away server, port %d", d.name, d.server.Port())
	}
	return fmt.Sprintf("%s on the server at %s", d.name, d.server.Addr())
}

// Close closes the pool, drops the database, and stops the server if it is a
// throw-away one.
func (d *Database) Close() error {
	if d.Pool != nil {
		d.Pool.Close()
	}
	if d.server.Owned() {
		return d.server.Stop() // the database goes with it
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := d.admin(ctx, "DROP DATABASE IF EXISTS "+d.name+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop database %s: %w", d.name, err)
	}
	return nil
}

// admin runs a statement outside the database.
func (d *Database) admin(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, d.server.URL())
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}
