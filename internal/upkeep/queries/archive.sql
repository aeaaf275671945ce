-- The statement that copies a partition. It goes by way of the log, which is what
-- a reader may read, and reads nothing but the partition; what is marked of the
-- DEFAULT one, whose rows are of any time, is read from that itself. Its times are
-- written as no setting of the session's changes them.
--
-- $1 partition, $2 the log, $3 the DEFAULT partition
SELECT format('COPY (SELECT m.era, m.id, m.xid, m.topic, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.target_group, m.attempt '
           'FROM %s m WHERE %s) TO STDOUT WITH (FORMAT csv, HEADER)',
       CASE WHEN p.lower IS NULL THEN 'ONLY ' || $3::text ELSE $2::text END,
       CASE WHEN p.lower IS NULL
           THEN format('m.era <> %s OR pg_catalog.pg_visible_in_snapshot(m.xid, %L)', p.seal_era, p.seal)
           ELSE format('m.created_at >= %L AND m.created_at < %L AND m.tableoid = %s',
               to_char(p.lower AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US+00'), to_char(p.upper AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US+00'), a.relation)
       END)
FROM outbox.partitions p
CROSS JOIN LATERAL (
    SELECT i.inhrelid::bigint AS relation FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = to_regclass($2::text) AND c.relname = p.name) AS a
WHERE p.name = $1::text
