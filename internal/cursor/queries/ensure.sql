-- Makes a group's cursors of a topic unless it has some: one for each shard, all
-- beginning at the same place. The statement's own snapshot decides what
-- "latest" means, so the position is fixed when it returns. Of those who ask at
-- the same time the first decides how many there are: the others wait for its
-- first row, and then make none. Where there are cursors their number stands,
-- and one that was removed is made again, unless they are over other topics.
--
-- $1 group, $2 topic, $3 shards, $4 start at the latest instead of the earliest,
-- $5 the patterns of its topics, where the topic is ''
WITH start AS MATERIALIZED (
    SELECT outbox.era() AS era,
           CASE WHEN $4::boolean THEN pg_current_snapshot() ELSE '1:1:'::pg_snapshot END AS p,
           CASE WHEN $4::boolean THEN (SELECT s.last_value FROM outbox.messages_id_seq s) ELSE 0 END AS floor,
           CASE WHEN $4::boolean THEN 'idle' ELSE 'past' END AS step
), stored AS MATERIALIZED (
    SELECT c.base, c.shards, c.patterns FROM outbox.cursors c
    WHERE c.consumer_group = $1::text AND c.topic = $2::text AND c.until IS NULL
    ORDER BY c.shard LIMIT 1
), first AS (
    INSERT INTO outbox.cursors (consumer_group, topic, shard, base, shards, era, p, floor, step, patterns)
    SELECT $1::text, $2::text, 0, 0, $3::integer, start.era, start.p, start.floor, start.step, $5::text[]
    FROM start
    WHERE NOT EXISTS (SELECT FROM outbox.cursors c WHERE c.consumer_group = $1::text AND c.topic = $2::text)
    ON CONFLICT (consumer_group, topic, shard) DO NOTHING
    RETURNING base, shards, patterns
), rest AS (
    INSERT INTO outbox.cursors (consumer_group, topic, shard, base, shards, era, p, floor, step, patterns)
    SELECT $1::text, $2::text, n.shard, g.base, g.shards, start.era, start.p, start.floor, start.step, g.patterns
    FROM start
    CROSS JOIN (
        SELECT 1 AS low, first.base, first.shards, first.patterns FROM first
        UNION ALL
        SELECT stored.base, stored.base, stored.shards, stored.patterns FROM stored
        WHERE stored.patterns IS NOT DISTINCT FROM $5::text[]
    ) AS g
    CROSS JOIN LATERAL generate_series(g.low, g.base + g.shards - 1) AS n (shard)
    WHERE NOT EXISTS (
        SELECT FROM outbox.cursors c WHERE c.consumer_group = $1::text AND c.topic = $2::text AND c.shard = n.shard)
    ON CONFLICT (consumer_group, topic, shard) DO NOTHING
)
-- 0 for those who came second.
SELECT coalesce((SELECT first.shards FROM first), (SELECT stored.shards FROM stored), 0),
       coalesce((SELECT first.patterns FROM first), (SELECT stored.patterns FROM stored))
