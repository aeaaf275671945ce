-- Takes those of the wanted cursors that nobody holds: no holder, the caller
-- itself (which has lost them otherwise, or it would not ask), a holder whose
-- process row is gone, or one whose beat is the one that the caller has watched
-- not to change for the lease time. In key order, passing over rows that
-- another candidate is taking. The state comes from the UPDATE itself, so no
-- checkpoint of the old holder can fall in between: its epoch no longer fits.
-- Cursors that wait for those before them to end, or whose number is about to be
-- changed, nobody gets; nor those that are over other topics than the caller
-- would read from their position.
--
-- $1 holder, $2 groups, $3 topics, $4 shards, $5 dead holders, $6 their beats,
-- $7 the patterns of each one's topics as JSON, NULL for one topic
WITH seen AS MATERIALIZED (
    SELECT c.consumer_group, c.topic, c.shard, c.epoch, w.patterns
    FROM outbox.cursors c
    JOIN unnest($2::text[], $3::text[], $4::integer[], $7::text[]) AS w (consumer_group, topic, shard, patterns)
        ON c.consumer_group = w.consumer_group AND c.topic = w.topic AND c.shard = w.shard
        AND to_jsonb(c.patterns) IS NOT DISTINCT FROM w.patterns::jsonb
        AND c.reshard IS NULL
        AND NOT EXISTS (
            SELECT FROM outbox.cursors o
            WHERE o.consumer_group = c.consumer_group AND o.topic = c.topic AND o.base < c.base)
    WHERE c.holder IS NULL OR c.holder = $1::text
        OR NOT EXISTS (SELECT FROM outbox.processes p WHERE p.holder = c.holder)
        OR EXISTS (
            SELECT FROM outbox.processes p
            JOIN unnest($5::text[], $6::bigint[]) AS d (holder, beat) ON d.holder = p.holder AND d.beat = p.beat
            WHERE p.holder = c.holder)
), free AS MATERIALIZED (
    -- What was seen free may have been taken since; the lock shows the newest
    -- row, but the conditions above would still see processes as they were
    -- before, and a holder that has only just begun would have none.
    SELECT c.consumer_group, c.topic, c.shard, c.reach, c.holder
    FROM outbox.cursors c
    JOIN seen ON c.consumer_group = seen.consumer_group AND c.topic = seen.topic AND c.shard = seen.shard
    WHERE c.epoch = seen.epoch AND to_jsonb(c.patterns) IS NOT DISTINCT FROM seen.patterns::jsonb AND c.reshard IS NULL
    ORDER BY c.consumer_group, c.topic, c.shard
    FOR UPDATE OF c SKIP LOCKED
)
UPDATE outbox.cursors c
-- The new holder may hand out some rows before it stores how far it went; 64 is
-- minReach of package delivery.
SET holder = $1::text, epoch = c.epoch + 1, reach = least(free.reach + 64, 100000), updated_at = now()
FROM free
WHERE c.consumer_group = free.consumer_group AND c.topic = free.topic AND c.shard = free.shard
RETURNING c.consumer_group, c.topic, c.shard, c.epoch, c.era, c.p::text, c.floor, c.step, c.c::text, c.top, c.at, c.at_era,
    c.holes::text, c.past::text, c.ahead::text,
    free.reach, coalesce(free.holder, ''), outbox.era(), (SELECT b.life::text FROM outbox.boot b), pg_current_snapshot()::text,
    c.shards, c.base, c.until::text, c.until_top, c.until_era, c.patterns
