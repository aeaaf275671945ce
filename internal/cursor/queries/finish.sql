-- Removes a cursor that has come to its end and is still held under its epoch,
-- in the life of the server that its position comes from. What is left unacked
-- goes to the cursor of the next division that its key belongs to, which nobody
-- can have taken yet, so the order per key stands. Returns whether it was
-- removed.
--
-- $1 topics, $2 holder, $3 group, $4 the topic that the cursor is named by, $5 shard,
-- $6 epoch, $7 $8 life, $9 holes
WITH gone AS (
    DELETE FROM outbox.cursors c
    WHERE c.consumer_group = $3::text AND c.topic = $4::text AND c.shard = $5::integer
        AND c.epoch = $6::bigint AND c.holder = $2::text AND c.until IS NOT NULL
        AND $7::bigint = outbox.era() AND $8::text = (SELECT b.life::text FROM outbox.boot b)
    RETURNING c.base
), next AS MATERIALIZED (
    SELECT c.base, c.shards FROM outbox.cursors c, gone
    WHERE c.consumer_group = $3::text AND c.topic = $4::text AND c.base > gone.base
    ORDER BY c.shard LIMIT 1
), moved AS MATERIALIZED (
    -- Ranges of one leave the planner only the index, see holes.sql of package
    -- window.
    SELECT next.base + outbox.shard(r.key, r.id, next.shards) AS shard, jsonb_agg(h.hole) AS holes
    FROM next
    CROSS JOIN jsonb_array_elements($9::text::jsonb) AS h (hole)
    CROSS JOIN LATERAL (
        SELECT m.key, m.id FROM :messages m
        WHERE :chosen AND m.era >= (h.hole ->> 'era')::bigint AND m.era <= (h.hole ->> 'era')::bigint
            AND m.id >= (h.hole ->> 'id')::bigint AND m.id <= (h.hole ->> 'id')::bigint
        ORDER BY m.era, m.id OFFSET 0
    ) AS r
    GROUP BY 1
), locked AS MATERIALIZED (
    SELECT c.shard FROM outbox.cursors c
    WHERE c.consumer_group = $3::text AND c.topic = $4::text AND c.shard IN (SELECT moved.shard FROM moved)
    ORDER BY c.shard FOR UPDATE
), added AS (
    UPDATE outbox.cursors c
    SET holes = (
        SELECT jsonb_agg(h.hole ORDER BY (h.hole ->> 'era')::bigint, (h.hole ->> 'id')::bigint)
        FROM jsonb_array_elements(c.holes || moved.holes) AS h (hole)),
        updated_at = now()
    FROM moved JOIN locked ON locked.shard = moved.shard
    WHERE c.consumer_group = $3::text AND c.topic = $4::text AND c.shard = moved.shard
)
SELECT count(*) FROM gone
