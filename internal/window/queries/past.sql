-- A page of what other clusters wrote and the group was not handed out there.
--
-- $1 topic, $2 group, $3 rows, $4 bytes, $5 $6 after this era and id,
-- $7 eras that are known, $8 their P, $9 their open window (sees nothing if
-- none), $10 the last id handed out in it
--
-- Two ranges of the index, below and above the server's own era, so that the
-- rows of that are not read. System identifiers begin with the time of initdb,
-- so eras sort by age.
SELECT 0 AS step, NULL::bigint AS id, NULL::text, NULL::text, NULL::json, NULL::bytea, NULL::timestamptz, NULL::integer, NULL::bigint,
       outbox.era() AS era, (SELECT b.life::text FROM outbox.boot b) AS life
UNION ALL
SELECT 3, page.id, page.key, page.uuid, page.metadata, page.payload, page.created_at, page.attempt, page.total, page.era, NULL
FROM (
    SELECT r.*, sum(r.size) OVER (ORDER BY r.era, r.id ROWS UNBOUNDED PRECEDING) AS total FROM (
        (
            SELECT m.era, m.id, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.attempt,
                   coalesce(octet_length(m.payload), 0) + 100
                       + CASE WHEN pg_column_size(m.metadata) < 500 THEN pg_column_size(m.metadata) ELSE octet_length(m.metadata::text) END AS size
            FROM outbox.messages m
            WHERE m.topic = $1::text AND m.era < outbox.era()
                AND (m.era, m.id) > ($5::bigint, $6::bigint)
                AND NOT EXISTS (
                    SELECT FROM unnest($7::bigint[], $8::text[], $9::text[], $10::bigint[]) AS k (era, p, c, at)
                    WHERE k.era = m.era AND (
                        pg_visible_in_snapshot(m.xid, k.p::pg_snapshot)
                        OR (pg_visible_in_snapshot(m.xid, k.c::pg_snapshot) AND m.id <= k.at)))
                AND (m.target_group IS NULL OR m.target_group = $2::text)
            ORDER BY m.era, m.id LIMIT $3::bigint
        )
        UNION ALL
        (
            SELECT m.era, m.id, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.attempt,
                   coalesce(octet_length(m.payload), 0) + 100
                       + CASE WHEN pg_column_size(m.metadata) < 500 THEN pg_column_size(m.metadata) ELSE octet_length(m.metadata::text) END AS size
            FROM outbox.messages m
            WHERE m.topic = $1::text AND m.era > outbox.era()
                AND (m.era, m.id) > ($5::bigint, $6::bigint)
                AND NOT EXISTS (
                    SELECT FROM unnest($7::bigint[], $8::text[], $9::text[], $10::bigint[]) AS k (era, p, c, at)
                    WHERE k.era = m.era AND (
                        pg_visible_in_snapshot(m.xid, k.p::pg_snapshot)
                        OR (pg_visible_in_snapshot(m.xid, k.c::pg_snapshot) AND m.id <= k.at)))
                AND (m.target_group IS NULL OR m.target_group = $2::text)
            ORDER BY m.era, m.id LIMIT $3::bigint
        )
        ORDER BY 1, 2 LIMIT $3::bigint
    ) AS r
) AS page
WHERE page.total - page.size < $4::bigint
