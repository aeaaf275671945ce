package tests

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/schema"
)

// catalogText describes everything that users made in a database, one line
// each.
const catalogText = `
WITH namespace AS (
    SELECT n.* FROM pg_catalog.pg_namespace n WHERE n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'
), relation AS (
    SELECT c.*, n.nspname FROM pg_catalog.pg_class c JOIN namespace n ON n.oid = c.relnamespace
)
SELECT format('schema %I acl=%s', n.nspname, n.nspacl) AS line FROM namespace n
UNION ALL
SELECT format('relation %I.%I kind=%s persistence=%s options=%s bound=%s acl=%s', r.nspname, r.relname, r.relkind, r.relpersistence,
              r.reloptions, pg_catalog.pg_get_expr(r.relpartbound, r.oid), r.relacl)
FROM relation r
UNION ALL
SELECT format('column %I.%I.%I %s collation=%s position=%s notnull=%s identity=%s default=%s acl=%s', r.nspname, r.relname, a.attname,
              pg_catalog.format_type(a.atttypid, a.atttypmod), a.attcollation::pg_catalog.regcollation, a.attnum, a.attnotnull, a.attidentity,
              pg_catalog.pg_get_expr(d.adbin, d.adrelid), a.attacl)
FROM relation r
JOIN pg_catalog.pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
UNION ALL
SELECT format('index %s valid=%s', pg_catalog.pg_get_indexdef(r.oid), i.indisvalid)
FROM relation r JOIN pg_catalog.pg_index i ON i.indexrelid = r.oid
UNION ALL
SELECT format('constraint %I.%I %I %s', r.nspname, r.relname, k.conname, pg_catalog.pg_get_constraintdef(k.oid))
FROM relation r JOIN pg_catalog.pg_constraint k ON k.conrelid = r.oid
UNION ALL
SELECT format('sequence %I.%I start=%s increment=%s cache=%s cycle=%s', r.nspname, r.relname, s.seqstart, s.seqincrement, s.seqcache, s.seqcycle)
FROM relation r JOIN pg_catalog.pg_sequence s ON s.seqrelid = r.oid
UNION ALL
SELECT format('function %s acl=%s', pg_catalog.pg_get_functiondef(p.oid), p.proacl)
FROM pg_catalog.pg_proc p JOIN namespace n ON n.oid = p.pronamespace
UNION ALL
SELECT format('trigger %s', pg_catalog.pg_get_triggerdef(t.oid))
FROM relation r JOIN pg_catalog.pg_trigger t ON t.tgrelid = r.oid AND NOT t.tgisinternal
ORDER BY line`

// catalog describes a database, to compare it with itself later or with another
// one.
func catalog(t testing.TB, db schema.Querier) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), catalogText)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return lines
}
