-- Changes the number of shards as was asked for, if no living process holds one.
-- The caller has locked the cursors in an earlier statement, so whatever was
-- stored comes from before this one's snapshot: the old cursors end there, the
-- new ones begin there, and every message is either one's.
--
-- Rows of other clusters are the old cursors': to the new ones each such era is
-- one of which everything has been handed out.
--
-- $1 group, $2 topic, $3 dead holders, $4 their beats
WITH now AS MATERIALIZED (
    SELECT outbox.era() AS era, pg_current_snapshot() AS c, (SELECT s.last_value FROM outbox.messages_id_seq s) AS top
), old AS MATERIALIZED (
    SELECT c.* FROM outbox.cursors c
    WHERE c.consumer_group = $1::text AND c.topic = $2::text AND c.until IS NULL
), wish AS MATERIALIZED (
    SELECT max(o.reshard) AS shards, max(o.base + o.shards) AS base FROM old o
    HAVING bool_and(o.reshard IS NOT NULL) AND NOT bool_or(EXISTS (
        SELECT FROM outbox.processes p WHERE p.holder = o.holder AND NOT EXISTS (
            SELECT FROM unnest($3::text[], $4::bigint[]) AS d (holder, beat) WHERE d.holder = p.holder AND d.beat = p.beat)))
), past AS MATERIALIZED (
    SELECT coalesce(jsonb_object_agg(e.era, jsonb_build_object('p', '4611686018427387903:4611686018427387903:')), '{}') AS eras
    FROM (
        SELECT k.era FROM old o CROSS JOIN LATERAL jsonb_object_keys(o.past) AS k (era)
        UNION
        SELECT o.era::text FROM old o
    ) AS e, now
    WHERE e.era <> now.era::text
), ended AS (
    UPDATE outbox.cursors c
    SET until = now.c, until_top = now.top, until_era = now.era, reshard = NULL, holder = NULL, epoch = c.epoch + 1, updated_at = now()
    FROM now, wish
    WHERE c.consumer_group = $1::text AND c.topic = $2::text AND c.until IS NULL
), made AS (
    INSERT INTO outbox.cursors (consumer_group, topic, shard, base, shards, era, p, floor, step, past)
    SELECT $1::text, $2::text, n.shard, wish.base, wish.shards, now.era, now.c, now.top, 'idle', past.eras
    FROM now, wish, past, LATERAL generate_series(wish.base, wish.base + wish.shards - 1) AS n (shard)
    RETURNING shard
)
SELECT count(*) FROM made
