-- A page of what other clusters wrote and the group was not handed out there.
--
-- $1 topics, $2 group, $3 rows, $4 bytes, $5 $6 after this era and id,
-- $7 eras that are known, $8 their P, $9 their open window (sees nothing if
-- none), $10 the last id handed out in it, $11 how many rows to look at,
-- $12 shard, $13 of so many, $14 the era of an end if there is one, $15 the end,
-- whose rows beyond it are not this position's
--
-- After a move to another cluster nearly all rows are such, and handed out: one
-- page looks at a bounded number, so that no statement runs for as long as the
-- table is large; of many topics at so many of all, since few may be chosen. The
-- first row says how far it looked. Two ranges of the index,
-- below and above the server's own era, so that the rows of that are not read.
-- System identifiers begin with the time of initdb, so eras sort by age.
WITH scanned AS MATERIALIZED (
    SELECT r.era, r.id, r.xid, r.key, r.chosen FROM (
        (
            SELECT m.era, m.id, m.xid, m.key, :rest AS chosen FROM :messages m
            WHERE :range AND m.era < outbox.era() AND (m.era, m.id) > ($5::bigint, $6::bigint)
            ORDER BY m.era, m.id LIMIT $11::bigint
        )
        UNION ALL
        (
            SELECT m.era, m.id, m.xid, m.key, :rest AS chosen FROM :messages m
            WHERE :range
                -- Where it begins must be one comparison: of two, the scan would
                -- begin at this one and walk the rows of the server's own era.
                AND (m.era, m.id) > (greatest($5::bigint, outbox.era()),
                    CASE WHEN $5::bigint > outbox.era() THEN $6::bigint ELSE 9223372036854775807 END)
            ORDER BY m.era, m.id LIMIT $11::bigint
        )
    ) AS r
    ORDER BY r.era, r.id LIMIT $11::bigint
), known AS MATERIALIZED (
    SELECT k.era, k.p::pg_snapshot AS p, k.c::pg_snapshot AS c, k.at
    FROM unnest($7::bigint[], $8::text[], $9::text[], $10::bigint[]) AS k (era, p, c, at)
), fresh AS MATERIALIZED (
    SELECT s.era, s.id FROM scanned s
    WHERE s.chosen AND ($13::integer = 1 OR outbox.shard(s.key, s.id, $13::integer) = $12::integer)
        AND (s.era IS DISTINCT FROM $14::bigint OR pg_visible_in_snapshot(s.xid, $15::text::pg_snapshot))
        AND NOT EXISTS (
        SELECT FROM known k
        WHERE k.era = s.era AND (
            pg_visible_in_snapshot(s.xid, k.p) OR (pg_visible_in_snapshot(s.xid, k.c) AND s.id <= k.at)))
), page AS (
    SELECT r.*, sum(r.size) OVER (ORDER BY r.era, r.id ROWS UNBOUNDED PRECEDING) AS total FROM (
        SELECT l.* FROM fresh CROSS JOIN LATERAL (
            SELECT m.era, m.id, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.attempt, :topic AS topic,
                   coalesce(octet_length(m.payload), 0) + 100
                       + CASE WHEN pg_column_size(m.metadata) < 500 AND pg_column_compression(m.metadata) IS NULL THEN pg_column_size(m.metadata) ELSE octet_length(m.metadata::text) END AS size
            FROM :messages m
            WHERE :chosen AND m.era >= fresh.era AND m.era <= fresh.era
                AND m.id >= fresh.id AND m.id <= fresh.id
                AND (m.target_group IS NULL OR m.target_group = $2::text)
            ORDER BY m.era, m.id OFFSET 0
        ) AS l
        ORDER BY l.era, l.id LIMIT $3::bigint
    ) AS r
)
SELECT 0 AS step, NULL::bigint AS id, NULL::text, NULL::text, NULL::json, NULL::bytea, NULL::timestamptz, NULL::integer, NULL::bigint,
       outbox.era() AS era, (SELECT b.life::text FROM outbox.boot b) AS life, NULL::text AS topic,
       (SELECT count(*) FROM scanned), last.era, last.id
FROM (SELECT) AS one LEFT JOIN (SELECT s.era, s.id FROM scanned s ORDER BY s.era DESC, s.id DESC LIMIT 1) AS last ON true
UNION ALL
SELECT 3, page.id, page.key, page.uuid, page.metadata, page.payload, page.created_at, page.attempt, page.total, page.era, NULL, page.topic,
       NULL, NULL, NULL
FROM page
WHERE page.total - page.size < $4::bigint
