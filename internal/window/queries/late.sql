-- A further page of a window's late rows, transaction by transaction. The era is
-- compared so that no index finds rows by it: of a young partition without
-- statistics the planner expects few, and it would walk all up to the floor.
--
-- $1 topics, $2 group, $3 rows, $4 bytes, $5 after this id, $6 floor,
-- $7 the transactions with late rows, all of which C sees and P does not,
-- $8 shard, $9 of so many
SELECT 0 AS step, NULL::bigint AS id, NULL::text, NULL::text, NULL::json, NULL::bytea, NULL::timestamptz, NULL::integer, :spare,
       outbox.era() AS era, (SELECT b.life::text FROM outbox.boot b) AS life, NULL::text AS topic
UNION ALL
SELECT 1, page.id, page.key, page.uuid, page.metadata, page.payload, page.created_at, page.attempt, page.total, NULL, NULL, page.topic
FROM (
    SELECT r.*, sum(r.size) OVER (ORDER BY r.id ROWS UNBOUNDED PRECEDING) AS total FROM (
        SELECT l.* FROM unnest($7::text[]) AS x (xid) CROSS JOIN LATERAL (
            SELECT m.id, m.key, m.uuid, m.metadata, m.payload, m.created_at, m.attempt, :topic AS topic,
                   coalesce(octet_length(m.payload), 0) + 100
                       + CASE WHEN pg_column_size(m.metadata) < 500 AND pg_column_compression(m.metadata) IS NULL THEN pg_column_size(m.metadata) ELSE octet_length(m.metadata::text) END AS size
            FROM :messages m
            WHERE :chosen AND m.xid >= x.xid::xid8 AND m.xid <= x.xid::xid8
                AND m.id > $5::bigint AND m.id <= $6::bigint
                AND m.era - 0 = outbox.era() AND (m.target_group IS NULL OR m.target_group = $2::text)
                AND ($9::integer = 1 OR outbox.shard(m.key, m.id, $9::integer) = $8::integer)
            ORDER BY m.xid, m.id LIMIT $3::bigint
        ) AS l
        ORDER BY l.id LIMIT $3::bigint
    ) AS r
) AS page
WHERE page.total - page.size < $4::bigint
