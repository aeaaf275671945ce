package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/promote"
)

// poolNamed is a pool with the settings of a consumer's sessions, under a name.
func (f *fixture) poolNamed(t testing.TB, name string) *pgxpool.Pool {
	t.Helper()
	config := f.pool.Config()
	for setting, value := range consumerSettings {
		config.ConnConfig.RuntimeParams[setting] = value
	}
	config.ConnConfig.RuntimeParams["plan_cache_mode"] = "force_generic_plan"
	config.ConnConfig.RuntimeParams["application_name"] = name
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// lookPlan is what EXPLAIN says of one look.
type lookPlan struct {
	// buffers is how many pages it touched.
	buffers int
	plan    plan
}

// look explains the statement that a promoter's next step would run, instead of
// running it, as it is prepared for any values or for these.
func (f *fixture) look(t testing.TB, step func(promote.Querier), settings map[string]string) lookPlan {
	t.Helper()
	conn := f.connect(t)
	for name, value := range settings {
		_, err := conn.Exec(t.Context(), "SELECT set_config($1, $2, false)", name, value)
		require.NoError(t, err)
	}
	var got *lookPlan
	step(querierFunc(func(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
		values := make([]string, len(args))
		for i, arg := range args {
			switch arg := arg.(type) {
			case pgtype.Timestamptz:
				value, err := arg.Value()
				require.NoError(t, err)
				if at, ok := value.(time.Time); ok {
					value = at.Format(time.RFC3339Nano)
				}
				values[i] = quote(fmt.Sprint(value))
			default:
				values[i] = quote(fmt.Sprint(arg))
			}
		}
		_, err := conn.Exec(ctx, "DEALLOCATE ALL", pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		_, err = conn.Exec(ctx, "PREPARE hot AS "+sql, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		for range 2 { // the first one reads the catalogs, too, and marks what it found dead
			var text string
			require.NoError(t, conn.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE hot("+strings.Join(values, ", ")+")",
				pgx.QueryExecModeSimpleProtocol).Scan(&text))
			var answer []struct {
				Plan struct {
					plan

					Hit  int `json:"Shared Hit Blocks"`
					Read int `json:"Shared Read Blocks"`
				} `json:"Plan"`
			}
			require.NoError(t, json.Unmarshal([]byte(text), &answer))
			got = &lookPlan{answer[0].Plan.Hit + answer[0].Plan.Read, answer[0].Plan.plan}
		}
		return nil, context.Canceled
	}))
	require.NotNil(t, got)
	return *got
}

// However many messages wait, a look at them is a probe or two of an index.
// PostgreSQL is asked what it did, for a plan made for any values and for these,
// before there are statistics and after, with our settings and without.
func TestScheduledLooksCostNothing(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.fillDeferred("orders", 200_000, 3600)
	for _, analyzed := range []bool{false, true} {
		if analyzed {
			f.exec("VACUUM ANALYZE outbox.deferred")
		}
		for _, ours := range []bool{true, false} {
			for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
				settings := map[string]string{}
				if ours {
					for name, value := range consumerSettings {
						settings[name] = value
					}
				}
				settings["plan_cache_mode"] = mode
				got := f.look(t, func(db promote.Querier) {
					promoter, _ := f.promoter(db, nil)
					_, err := promoter.Step(t.Context())
					require.ErrorIs(t, err, context.Canceled)
				}, settings)
				t.Logf("analyzed %t, our settings %t, %s: %d buffers", analyzed, ours, mode, got.buffers)
				require.LessOrEqual(t, got.buffers, 20, "%s", got.plan)
				got.plan.walk(func(node plan, _ []plan) {
					require.NotEqual(t, "Seq Scan", node.Type, "%s", got.plan)
				})
			}
		}
	}
}

// The entries of messages that were moved stay in the index until a vacuum, which
// a transaction that stays open keeps from taking them out; and from that the
// looks of every queue in a table grow slower by the hour. Here most looks begin
// behind them.
func TestScheduledLooksReadPastNoDeadRows(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.fillDeferred("orders", 60_000, -100_000)
	f.fillDeferred("later", 1000, 3600)
	old, err := f.connect(t).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer old.Rollback(context.WithoutCancel(t.Context()))
	var n int
	require.NoError(t, old.QueryRow(t.Context(), f.sql("SELECT count(*) FROM outbox.deferred")).Scan(&n))

	pool := f.poolNamed(t, "promoter under test")
	var explain promote.Querier // instead of a look that is not full
	promoter, _ := f.promoter(querierFunc(func(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
		if explain != nil && args[3].(pgtype.Timestamptz).InfinityModifier == pgtype.Finite {
			return explain.Query(ctx, sql, args...)
		}
		return pool.Query(ctx, sql, args...)
	}), nil)
	begin := time.Now()
	f.promote(t, promoter)
	require.Len(t, f.storedUUIDs(t, "orders"), 60_000)
	t.Logf("60,000 moved in %s", time.Since(begin))

	got := f.look(t, func(db promote.Querier) {
		explain = db
		require.Eventually(t, func() bool {
			_, err := promoter.Step(t.Context())
			return errors.Is(err, context.Canceled)
		}, waitFor, time.Millisecond)
	}, consumerSettings)
	t.Logf("a look: %d buffers", got.buffers)
	require.LessOrEqual(t, got.buffers, 20, "%s", got.plan)

	// A full look, as of a promoter that knows nothing yet, is what that spares.
	got = f.look(t, func(db promote.Querier) {
		fresh, _ := f.promoter(db, nil)
		_, err := fresh.Step(t.Context())
		require.ErrorIs(t, err, context.Canceled)
	}, consumerSettings)
	t.Logf("a full look: %d buffers", got.buffers)
	require.Greater(t, got.buffers, 500, "nothing was spared")
}

// An idle look writes nothing: no transaction id, no WAL.
func TestScheduledIdleLooksWriteNothing(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.fillDeferred("orders", 10, 3600)
	promoter, _ := f.promoter(f.pool, nil)
	f.promote(t, promoter)
	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	inTx, _ := f.promoter(tx, nil)
	_, err = inTx.Step(t.Context())
	require.NoError(t, err)
	var none bool
	require.NoError(t, tx.QueryRow(t.Context(), "SELECT pg_current_xact_id_if_assigned() IS NULL").Scan(&none))
	require.True(t, none)
}
