-- Stores positions, of those cursors that are still held under the same epoch,
-- in the life of the server that the position comes from; a released one is
-- given up as well. Returns which ones were.
--
-- $1 holder, the rest one array per column
UPDATE outbox.cursors c
SET era = v.era, p = v.p::pg_snapshot, floor = v.floor, step = v.step, c = v.c::pg_snapshot, top = v.top, at = v.at,
    at_era = v.at_era, holes = v.holes::jsonb, past = v.past::jsonb, ahead = v.ahead::jsonb, reach = v.reach,
    holder = CASE WHEN v.release THEN NULL ELSE c.holder END, updated_at = now()
FROM unnest($2::text[], $3::text[], $4::integer[], $5::bigint[], $6::bigint[], $7::text[], $8::bigint[], $9::text[],
            $10::text[], $11::bigint[], $12::bigint[], $13::bigint[], $14::text[], $15::text[], $16::boolean[],
            $17::bigint[], $18::text[], $19::text[], $20::integer[])
    AS v (consumer_group, topic, shard, epoch, era, p, floor, step, c, top, at, at_era, holes, past, release, life_era, life, ahead, reach)
WHERE c.consumer_group = v.consumer_group AND c.topic = v.topic AND c.shard = v.shard
    AND c.epoch = v.epoch AND c.holder = $1::text
    AND v.life_era = outbox.era() AND v.life = (SELECT b.life::text FROM outbox.boot b)
    -- A server that was put back to an older copy is in the same life, and has
    -- yet to do what the position says was handed out.
    AND (v.era <> outbox.era() OR pg_snapshot_xmax(coalesce(v.c, v.p)::pg_snapshot) <= pg_snapshot_xmax(pg_current_snapshot()))
RETURNING c.consumer_group, c.topic, c.shard
