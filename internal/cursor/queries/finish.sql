-- Removes a cursor that has come to its end and is still held under its epoch,
-- in the life of the server that its position comes from. What is left unacked
-- goes to the cursor of the next division that its key belongs to, which nobody
-- can have taken yet, so the order per key stands. Returns whether it was
-- removed.
--
-- $1 holder, $2 group, $3 topic, $4 shard, $5 epoch, $6 $7 life, $8 holes
WITH gone AS (
    DELETE FROM outbox.cursors c
    WHERE c.consumer_group = $2::text AND c.topic = $3::text AND c.shard = $4::integer
        AND c.epoch = $5::bigint AND c.holder = $1::text AND c.until IS NOT NULL
        AND $6::bigint = outbox.era() AND $7::text = (SELECT b.life::text FROM outbox.boot b)
    RETURNING c.base
), next AS MATERIALIZED (
    SELECT c.base, c.shards FROM outbox.cursors c, gone
    WHERE c.consumer_group = $2::text AND c.topic = $3::text AND c.base > gone.base
    ORDER BY c.shard LIMIT 1
), moved AS MATERIALIZED (
    SELECT next.base + outbox.shard(m.key, m.id, next.shards) AS shard, jsonb_agg(h.hole) AS holes
    FROM next
    CROSS JOIN jsonb_array_elements($8::text::jsonb) AS h (hole)
    JOIN outbox.messages m ON m.topic = $3::text AND m.era = (h.hole ->> 'era')::bigint AND m.id = (h.hole ->> 'id')::bigint
    GROUP BY 1
), locked AS MATERIALIZED (
    SELECT c.shard FROM outbox.cursors c
    WHERE c.consumer_group = $2::text AND c.topic = $3::text AND c.shard IN (SELECT moved.shard FROM moved)
    ORDER BY c.shard FOR UPDATE
), added AS (
    UPDATE outbox.cursors c
    SET holes = (
        SELECT jsonb_agg(h.hole ORDER BY (h.hole ->> 'era')::bigint, (h.hole ->> 'id')::bigint)
        FROM jsonb_array_elements(c.holes || moved.holes) AS h (hole)),
        updated_at = now()
    FROM moved JOIN locked ON locked.shard = moved.shard
    WHERE c.consumer_group = $2::text AND c.topic = $3::text AND c.shard = moved.shard
)
SELECT count(*) FROM gone
