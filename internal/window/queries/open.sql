-- Opens the next window and reads its first page: in the steady state, all of it.
--
-- $1 topics, $2 group, $3 P, $4 floor, $5 rows, $6 bytes, $7 shard, $8 of so many,
-- $9 main rows up to this id at most
--
-- The first row (step 0) says what the window is: C, top, the life of the server
-- and the transactions with late rows. pg_current_snapshot() is the snapshot
-- the statement itself reads with, so no row needs a test against C here.
WITH now AS MATERIALIZED (
    SELECT pg_current_snapshot() AS c, $3::text::pg_snapshot AS p,
           (SELECT s.last_value FROM outbox.messages_id_seq s) AS top
), gap AS MATERIALIZED (
    -- [xmax(P), xmax(C)) without xip(C), as open intervals between the running
    -- ones. One range per gap: an OR, or a list of what is excluded, would walk
    -- the rows of a bulk load that is still open at every poll.
    SELECT b.low, b.high FROM (
        SELECT lag(e.x) OVER (ORDER BY e.x) AS low, e.x AS high FROM (
            SELECT (pg_snapshot_xmax(now.p)::text::numeric - 1)::text::xid8 FROM now
            UNION ALL
            SELECT x FROM now, pg_snapshot_xip(now.c) x WHERE x >= pg_snapshot_xmax(now.p)
            UNION ALL
            SELECT pg_snapshot_xmax(now.c) FROM now
        ) AS e (x)
    ) AS b
    WHERE b.low < b.high AND $4::bigint > 0
), late_xid AS MATERIALIZED (
    SELECT x AS xid FROM now, pg_snapshot_xip(now.p) x WHERE pg_visible_in_snapshot(x, now.c)
    UNION
    SELECT r.xid FROM gap CROSS JOIN LATERAL (
        SELECT m.xid FROM :messages m
        WHERE :chosen AND m.xid > gap.low AND m.xid < gap.high AND m.id <= $4::bigint
        OFFSET 0
    ) AS r
), late AS MATERIALIZED (
    -- Transaction by transaction: within one, the index has the rows by id. The
    -- range of one transaction, and the order that names it, leave the planner
    -- no other index: where a partition is one bulk load it would walk that. So
    -- does the era, see late.sql.
    SELECT r.* FROM late_xid CROSS JOIN LATERAL (
        SELECT m.id, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.attempt, :topic AS topic,
           coalesce(octet_length(m.payload), 0) + 100
               + CASE WHEN pg_column_size(m.metadata) < 500 AND pg_column_compression(m.metadata) IS NULL THEN pg_column_size(m.metadata) ELSE octet_length(m.metadata::text) END AS size
        FROM :messages m
        WHERE :chosen AND m.xid >= late_xid.xid AND m.xid <= late_xid.xid AND m.id <= $4::bigint
            AND m.era - 0 = outbox.era() AND (m.target_group IS NULL OR m.target_group = $2::text)
            AND ($8::integer = 1 OR outbox.shard(m.key, m.id, $8::integer) = $7::integer)
        ORDER BY m.xid, m.id LIMIT $5::bigint
    ) AS r
    ORDER BY r.id LIMIT $5::bigint
), main AS NOT MATERIALIZED (
    SELECT m.id, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.attempt, :topic AS topic,
           coalesce(octet_length(m.payload), 0) + 100
               + CASE WHEN pg_column_size(m.metadata) < 500 AND pg_column_compression(m.metadata) IS NULL THEN pg_column_size(m.metadata) ELSE octet_length(m.metadata::text) END AS size
    FROM :messages m
    WHERE :chosen AND m.era = outbox.era()
        AND m.id > $4::bigint AND m.id <= (SELECT least(now.top, $9::bigint) FROM now)
        AND NOT pg_visible_in_snapshot(m.xid, (SELECT now.p FROM now)) AND (m.target_group IS NULL OR m.target_group = $2::text)
        AND ($8::integer = 1 OR outbox.shard(m.key, m.id, $8::integer) = $7::integer)
    ORDER BY m.id LIMIT greatest($5::bigint - (SELECT count(*) FROM late), 0)
), page AS (
    -- In the order of the two parts, without a sort; the reader checks it.
    SELECT r.*, sum(r.size) OVER (ROWS UNBOUNDED PRECEDING) AS total
    FROM (SELECT 1 AS step, late.* FROM late UNION ALL SELECT 2, main.* FROM main) AS r
)
SELECT 0 AS step, NULL::bigint AS id, NULL::text, NULL::text, NULL::json, NULL::bytea, NULL::timestamptz, NULL::integer, :spare,
       outbox.era() AS era, (SELECT b.life::text FROM outbox.boot b) AS life, NULL::text AS topic, now.c::text, now.top,
       (SELECT array_agg(l.xid::text) FROM late_xid l)
FROM now
UNION ALL
SELECT page.step, page.id, page.key, page.uuid, page.metadata, page.payload, page.created_at, page.attempt, page.total,
       NULL, NULL, page.topic, NULL, NULL, NULL
FROM page WHERE page.total - page.size < $6::bigint
