-- The transactions with late rows in a window that was opened by another
-- process, or before a restart: what open.sql found when it began.
--
-- $1 topics, $2 P, $3 C, $4 floor
WITH now AS MATERIALIZED (
    SELECT $2::text::pg_snapshot AS p, $3::text::pg_snapshot AS c
), gap AS MATERIALIZED (
    SELECT b.low, b.high FROM (
        SELECT lag(e.x) OVER (ORDER BY e.x) AS low, e.x AS high FROM (
            SELECT (pg_snapshot_xmax(now.p)::text::numeric - 1)::text::xid8 FROM now
            UNION ALL
            SELECT x FROM now, pg_snapshot_xip(now.c) x WHERE x >= pg_snapshot_xmax(now.p)
            UNION ALL
            SELECT pg_snapshot_xmax(now.c) FROM now
        ) AS e (x)
    ) AS b
    WHERE b.low < b.high
), late_xid AS (
    SELECT x AS xid FROM now, pg_snapshot_xip(now.p) x WHERE pg_visible_in_snapshot(x, now.c)
    UNION
    SELECT r.xid FROM gap CROSS JOIN LATERAL (
        SELECT m.xid FROM :messages m
        WHERE :chosen AND m.xid > gap.low AND m.xid < gap.high AND m.id <= $4::bigint
        OFFSET 0
    ) AS r
)
SELECT outbox.era(), (SELECT b.life::text FROM outbox.boot b), coalesce(array_agg(l.xid::text), '{}') FROM late_xid l
