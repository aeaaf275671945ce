-- The rows of holes, by era and id. Ranges of one, and the order, leave the
-- planner only the index on them.
--
-- $1 topics, $2 group, $3 rows, $4 bytes, $5 eras, $6 ids
SELECT 0 AS step, NULL::bigint AS id, NULL::text, NULL::text, NULL::json, NULL::bytea, NULL::timestamptz, NULL::integer, NULL::bigint,
       outbox.era() AS era, (SELECT b.life::text FROM outbox.boot b) AS life, NULL::text AS topic
UNION ALL
SELECT 4, page.id, page.key, page.uuid, page.metadata, page.payload, page.created_at, page.attempt, page.total, page.era, NULL, page.topic
FROM (
    SELECT r.*, sum(r.size) OVER (ORDER BY r.era, r.id ROWS UNBOUNDED PRECEDING) AS total FROM (
        SELECT l.* FROM unnest($5::bigint[], $6::bigint[]) AS h (era, id) CROSS JOIN LATERAL (
            SELECT m.era, m.id, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.attempt, :topic AS topic,
                   coalesce(octet_length(m.payload), 0) + 100
                       + CASE WHEN pg_column_size(m.metadata) < 500 AND pg_column_compression(m.metadata) IS NULL THEN pg_column_size(m.metadata) ELSE octet_length(m.metadata::text) END AS size
            FROM :messages m
            WHERE :chosen AND m.era >= h.era AND m.era <= h.era AND m.id >= h.id AND m.id <= h.id
            ORDER BY m.era, m.id OFFSET 0
        ) AS l
        WHERE $2::text IS NOT NULL
        ORDER BY l.era, l.id LIMIT $3::bigint
    ) AS r
) AS page
WHERE page.total - page.size < $4::bigint
