-- The oldest running or prepared transaction: the creation of a slot would wait
-- for it. Sessions of other roles show their age only to pg_read_all_stats.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
       coalesce(o.age, 0)::float8, coalesce(o.who, 'an unknown session')
FROM (SELECT) AS one
LEFT JOIN LATERAL (
    SELECT extract(epoch FROM clock_timestamp() - t.since) AS age, t.who
    FROM (
        SELECT a.xact_start AS since, format('process %s (%s)', a.pid, a.application_name) AS who
        FROM pg_catalog.pg_stat_activity a WHERE a.backend_xid IS NOT NULL
        UNION ALL
        SELECT x.prepared, format('prepared transaction %L', x.gid) FROM pg_catalog.pg_prepared_xacts x
    ) AS t
    ORDER BY t.since NULLS LAST LIMIT 1
) AS o ON true
