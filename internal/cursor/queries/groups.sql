-- How far groups are: their cursors with what is not delivered yet, of a page of
-- (group, topic).
--
-- $1 group or '', $2 all topics, $3 or this one, $4 $5 after this group and topic,
-- $6 so many, $7 how many rows to count at most of each cursor
WITH now AS MATERIALIZED (
    SELECT outbox.era() AS era, pg_current_snapshot() AS c
), page AS MATERIALIZED (
    SELECT DISTINCT c.consumer_group, c.topic FROM outbox.cursors c
    WHERE ($1::text = '' OR c.consumer_group = $1::text) AND ($2::boolean OR c.topic = $3::text)
        AND (c.consumer_group, c.topic) > ($4::text COLLATE "C", $5::text COLLATE "C")
    ORDER BY c.consumer_group, c.topic LIMIT $6::bigint
), k AS MATERIALIZED (
    :positions
    JOIN page ON page.consumer_group = c.consumer_group AND page.topic = c.topic
), counted AS (
    SELECT k.consumer_group, k.topic, k.shard, r.n, r.whole, r.oldest
    FROM k CROSS JOIN LATERAL (
        SELECT coalesce(sum(b.mine), 0) AS n, coalesce(bool_and(b.n < $7::bigint), true) AS whole, min(b.oldest) AS oldest
        FROM (
            SELECT count(*) AS n, count(*) FILTER (WHERE u.mine) AS mine, min(u.created_at) FILTER (WHERE u.mine) AS oldest
            FROM (
                :one
            ) AS u
            GROUP BY u.branch
        ) AS b
    ) AS r
    WHERE k.patterns IS NULL
    UNION ALL
    SELECT k.consumer_group, k.topic, k.shard, r.n, r.whole, r.oldest
    FROM k CROSS JOIN LATERAL (
        SELECT coalesce(sum(b.mine), 0) AS n, coalesce(bool_and(b.n < $7::bigint), true) AS whole, min(b.oldest) AS oldest
        FROM (
            SELECT count(*) AS n, count(*) FILTER (WHERE u.mine) AS mine, min(u.created_at) FILTER (WHERE u.mine) AS oldest
            FROM (
                :many
            ) AS u
            GROUP BY u.branch
        ) AS b
    ) AS r
    WHERE k.patterns IS NOT NULL
)
SELECT k.consumer_group, k.topic, k.patterns, k.shard, k.base, k.shards, k.reshard IS NOT NULL OR k.until IS NOT NULL,
       r.n, r.whole, least(r.oldest, h.oldest), h.n, k.updated_at, clock_timestamp(),
       coalesce(k.holder, ''), coalesce(p.host, ''), coalesce(p.pid, 0), p.beat_at
FROM k
JOIN counted r ON r.consumer_group = k.consumer_group AND r.topic = k.topic AND r.shard = k.shard
CROSS JOIN LATERAL (
    SELECT count(*) AS n, min((h.hole ->> 'created_at')::timestamptz) AS oldest FROM jsonb_array_elements(k.holes) AS h (hole)
) AS h
LEFT JOIN outbox.processes p ON p.holder = k.holder
ORDER BY k.consumer_group, k.topic, k.shard
