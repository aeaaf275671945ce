-- A further page of a window's main rows.
--
-- $1 topics, $2 group, $3 rows, $4 bytes, $5 after this id, $6 top, $7 P, $8 C,
-- $9 shard, $10 of so many
--
-- The snapshots stand in sub-selects so that their text is parsed once, not for
-- each row.
SELECT 0 AS step, NULL::bigint AS id, NULL::text, NULL::text, NULL::json, NULL::bytea, NULL::timestamptz, NULL::integer, :spare,
       outbox.era() AS era, (SELECT b.life::text FROM outbox.boot b) AS life, NULL::text AS topic
UNION ALL
SELECT 2, page.id, page.key, page.uuid, page.metadata, page.payload, page.created_at, page.attempt, page.total, NULL, NULL, page.topic
FROM (
    SELECT r.*, sum(r.size) OVER (ORDER BY r.id ROWS UNBOUNDED PRECEDING) AS total FROM (
        SELECT m.id, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.attempt, :topic AS topic,
               coalesce(octet_length(m.payload), 0) + 100
                   + CASE WHEN pg_column_size(m.metadata) < 500 AND pg_column_compression(m.metadata) IS NULL THEN pg_column_size(m.metadata) ELSE octet_length(m.metadata::text) END AS size
        FROM :messages m
        WHERE :chosen AND m.era = outbox.era()
            AND m.id > $5::bigint AND m.id <= $6::bigint
            AND NOT pg_visible_in_snapshot(m.xid, (SELECT $7::text::pg_snapshot))
            AND pg_visible_in_snapshot(m.xid, (SELECT $8::text::pg_snapshot))
            AND (m.target_group IS NULL OR m.target_group = $2::text)
            AND ($10::integer = 1 OR outbox.shard(m.key, m.id, $10::integer) = $9::integer)
        ORDER BY m.id LIMIT $3::bigint
    ) AS r
) AS page
WHERE page.total - page.size < $4::bigint
