-- Stores the position in which a row is settled, as save.sql does, and what
-- becomes of the row: a dead letter, or a place among the deferred. Both or
-- neither. The content does not travel.
--
-- When the outcome of the same statement is unknown, it is sent again unchanged.
-- If it was carried out, the cursor has that state already, since nothing was
-- stored in between, and the row is not settled a second time. The lock waits for
-- one that is still at it.
--
-- $1 to $20 as in save.sql, of one cursor; $21 era, $22 id, $23 attempts, $24
-- metadata instead of the row's, $25 dead, $26 error, $27 due, $28 or in so many
-- microseconds, $29 sent before, $30 the row's topic
WITH v AS MATERIALIZED (
    SELECT v.* FROM unnest($2::text[], $3::text[], $4::integer[], $5::bigint[], $6::bigint[], $7::text[], $8::bigint[], $9::text[],
                $10::text[], $11::bigint[], $12::bigint[], $13::bigint[], $14::text[], $15::text[], $16::boolean[],
                $17::bigint[], $18::text[], $19::text[], $20::integer[])
        AS v (consumer_group, topic, shard, epoch, era, p, floor, step, c, top, at, at_era, holes, past, release, life_era, life, ahead, reach)
), before AS MATERIALIZED (
    SELECT (c.era, c.p::text, c.floor, c.step, c.c::text, c.top, c.at, c.at_era, c.holes, c.past, c.ahead, c.reach)
            IS NOT DISTINCT FROM (v.era, v.p::pg_snapshot::text, v.floor, v.step, v.c::pg_snapshot::text, v.top, v.at, v.at_era,
                v.holes::jsonb, v.past::jsonb, v.ahead::jsonb, v.reach) AS same
    FROM outbox.cursors c JOIN v ON c.consumer_group = v.consumer_group AND c.topic = v.topic AND c.shard = v.shard
    WHERE $29::boolean AND c.epoch = v.epoch AND c.holder = $1::text
    FOR UPDATE OF c
), saved AS (
    UPDATE outbox.cursors c
    SET era = v.era, p = v.p::pg_snapshot, floor = v.floor, step = v.step, c = v.c::pg_snapshot, top = v.top, at = v.at,
        at_era = v.at_era, holes = v.holes::jsonb, past = v.past::jsonb, ahead = v.ahead::jsonb, reach = v.reach,
        holder = CASE WHEN v.release THEN NULL ELSE c.holder END, updated_at = now()
    FROM v, (SELECT coalesce(bool_or(b.same), false) AS settled FROM before b) AS known
    WHERE c.consumer_group = v.consumer_group AND c.topic = v.topic AND c.shard = v.shard
        AND c.epoch = v.epoch AND c.holder = $1::text
        AND v.life_era = outbox.era() AND v.life = (SELECT b.life::text FROM outbox.boot b)
        -- A server that was put back to an older copy is in the same life, and has
        -- yet to do what the position says was handed out.
        AND (v.era <> outbox.era() OR pg_snapshot_xmax(coalesce(v.c, v.p)::pg_snapshot) <= pg_snapshot_xmax(pg_current_snapshot()))
    RETURNING c.consumer_group, known.settled
), row AS MATERIALIZED (
    -- Ranges of one leave the planner only the index, see holes.sql of package
    -- window.
    SELECT s.consumer_group, m.topic, m.key, m.uuid, coalesce($24::text::json, m.metadata) AS metadata, m.payload, m.era, m.id, m.created_at
    FROM saved s CROSS JOIN LATERAL (
        SELECT m.* FROM outbox.messages m
        WHERE m.topic = $30::text AND m.era >= $21::bigint AND m.era <= $21::bigint AND m.id >= $22::bigint AND m.id <= $22::bigint
        ORDER BY m.era, m.id OFFSET 0
    ) AS m
    WHERE NOT s.settled
), dead AS (
    INSERT INTO outbox.dead_letters AS d (consumer_group, topic, key, uuid, metadata, payload, origin_era, origin_id, created_at, attempts, error)
    SELECT r.consumer_group, r.topic, r.key, r.uuid, r.metadata, r.payload, r.era, r.id, r.created_at, $23::integer, $26::text
    FROM row r WHERE $25::boolean
    ON CONFLICT (consumer_group, origin_era, origin_id) DO NOTHING -- somebody buried it
    RETURNING d.id, d.consumer_group, d.topic, d.key, d.uuid, d.origin_era, d.origin_id, d.attempts, d.error
), log AS (
    INSERT INTO outbox.dead_letter_log (action, reason, dead_letter_id, consumer_group, topic, key, uuid, origin_era, origin_id, attempts)
    SELECT 'died', d.error, d.id, d.consumer_group, d.topic, d.key, d.uuid, d.origin_era, d.origin_id, d.attempts FROM dead d
), deferred AS (
    INSERT INTO outbox.deferred (due_at, topic, key, uuid, metadata, payload, target_group, attempt, origin_era, origin_id)
    SELECT coalesce($27::timestamptz, clock_timestamp() + $28::bigint * interval '1 microsecond'),
        r.topic, r.key, r.uuid, r.metadata, r.payload, r.consumer_group, $23::integer, r.era, r.id
    FROM row r WHERE NOT $25::boolean AND NOT EXISTS (
        SELECT FROM outbox.dead_letters b -- somebody buried it
        WHERE b.consumer_group = r.consumer_group AND b.origin_era = r.era AND b.origin_id = r.id)
)
SELECT EXISTS (SELECT FROM saved)
