-- Moves a group's cursors of a topic, all of them to the same place, and says what
-- that means for its messages; or only says it. The caller has locked the cursors
-- in an earlier statement if they are to be moved.
--
-- For each era there is a cut: the rows below it are skipped, as far as this
-- statement sees them. What it does not see comes in any case, whatever its id. In
-- the server's own era the cut is a window from nothing to this snapshot that has
-- been handed out up to it; in others it is one that is over.
--
-- The holder stays: it loses its lease by the epoch, and takes the cursor again;
-- if it was freed another process would begin before the holder has stopped. The
-- cursors of an earlier number of shards, which are to be read to their end, have come
-- to it: from the new place on everything is their successors'. Nobody begins with
-- those before the last holder of an earlier one has given it back.
--
-- $1 group, $2 topic, $3 where to: earliest, latest, id, time; $4 era, 0 for the
-- server's own, and $5 id; $6 time, $7 how many rows to count at most, $8 move,
-- $9 messages may be skipped that were not delivered, $10 remove deferred retries,
-- $11 actor, $12 reason
WITH RECURSIVE now AS MATERIALIZED (
    SELECT outbox.era() AS era, pg_current_snapshot() AS c, (SELECT s.last_value FROM outbox.messages_id_seq s) AS top,
           coalesce(nullif($4::bigint, 0), outbox.era()) AS to_era
), k AS MATERIALIZED (
    :positions
    WHERE c.consumer_group = $1::text AND c.topic = $2::text
), one AS MATERIALIZED (
    SELECT k.topic, k.patterns, k.consumer_group FROM k ORDER BY k.shard DESC LIMIT 1
), stored (era) AS (
    SELECT (SELECT m.era FROM one k CROSS JOIN LATERAL (SELECT m.era, m.id FROM :messages m WHERE :chosen ORDER BY m.era, m.id LIMIT 1) AS m)
    UNION ALL
    SELECT (
        SELECT m.era FROM one k CROSS JOIN LATERAL (
            SELECT m.era, m.id FROM :messages m WHERE :chosen AND m.era > s.era ORDER BY m.era, m.id LIMIT 1
        ) AS m)
    FROM stored s WHERE s.era IS NOT NULL
), eras AS MATERIALIZED (
    SELECT s.era FROM stored s WHERE s.era IS NOT NULL
    UNION SELECT now.era FROM now
    UNION SELECT e.era::bigint FROM k CROSS JOIN LATERAL jsonb_object_keys(k.known) AS e (era)
), aim AS MATERIALIZED (
    SELECT e.era, e.era = now.era AS own,
           CASE $3::text
               WHEN 'earliest' THEN 0
               WHEN 'latest' THEN 9223372036854775807
               WHEN 'id' THEN CASE
                   WHEN e.era = now.to_era THEN $5::bigint
                   -- Others come before the server's own, by their age.
                   WHEN e.era <> now.era AND (now.to_era = now.era OR e.era < now.to_era) THEN 9223372036854775807
                   ELSE 0 END
               ELSE coalesce((
                   SELECT m.id FROM one k CROSS JOIN LATERAL (
                       SELECT m.era, m.id FROM :messages m
                       WHERE :chosen AND m.era = e.era AND m.created_at >= $6::timestamptz
                       ORDER BY m.era, m.id LIMIT 1
                   ) AS m), 9223372036854775807)
           END AS id
    FROM eras e CROSS JOIN now
), begin AS MATERIALIZED (
    -- Whether it begins with rows of other eras. Then all of the server's own comes.
    SELECT $3::text = 'earliest' OR coalesce(bool_or(a.id < 9223372036854775807) FILTER (WHERE NOT a.own), false) AS past FROM aim a
), cut AS MATERIALIZED (
    SELECT a.era, a.own, CASE
        WHEN a.own AND b.past THEN 0
        WHEN a.own AND a.id > now.top AND $3::text <> 'id' THEN 9223372036854775807
        ELSE a.id END AS id
    FROM aim a CROSS JOIN begin b CROSS JOIN now
), rest AS MATERIALIZED (
    SELECT k.shard, u.branch, u.mine, u.id, cut.id AS cut
    FROM k CROSS JOIN LATERAL (
        :undelivered
    ) AS u
    JOIN cut ON cut.era = u.era
), left_over AS MATERIALIZED (
    SELECT count(*) FILTER (WHERE r.id < r.cut) AS skipped, count(*) FILTER (WHERE r.id >= r.cut) AS coming
    FROM rest r WHERE r.mine
), looked AS MATERIALIZED (
    SELECT coalesce(bool_and(b.n < $7::bigint), true) AS whole
    FROM (SELECT count(*) AS n FROM rest r GROUP BY r.shard, r.branch) AS b
), unacked AS MATERIALIZED (
    SELECT count(*) FILTER (WHERE h.id < cut.id) AS skipped, count(*) FILTER (WHERE h.id >= cut.id) AS coming
    FROM (
        SELECT k.topic, k.patterns, (h.hole ->> 'era')::bigint AS era, (h.hole ->> 'id')::bigint AS id
        FROM k CROSS JOIN LATERAL jsonb_array_elements(k.holes) AS h (hole)
    ) AS h
    JOIN cut ON cut.era = h.era
    CROSS JOIN LATERAL (
        SELECT k.* FROM (SELECT h.topic, h.patterns) AS k CROSS JOIN LATERAL (
            SELECT m.id FROM :messages m
            WHERE :chosen AND m.era >= h.era AND m.era <= h.era AND m.id >= h.id AND m.id <= h.id
            ORDER BY m.era, m.id LIMIT 1
        ) AS m
    ) AS there
), total AS MATERIALIZED (
    SELECT count(*) AS n FROM (
        SELECT FROM one k CROSS JOIN cut CROSS JOIN LATERAL (
            SELECT FROM :messages m
            WHERE :chosen AND m.era = cut.era AND m.id >= cut.id AND cut.id < 9223372036854775807
                AND (m.target_group IS NULL OR m.target_group = k.consumer_group)
            LIMIT $7::bigint
        ) AS m
        LIMIT $7::bigint
    ) AS r
), waiting AS MATERIALIZED (
    SELECT m.id FROM one k JOIN outbox.deferred m ON :chosen AND m.target_group = k.consumer_group
), counted AS MATERIALIZED (
    SELECT l.skipped + u.skipped AS skipped, greatest(t.n - l.coming - u.coming, 0) AS again,
           o.whole AND t.n < $7::bigint AS exact, o.whole AS skips_known,
           (SELECT bool_or(cut.id > 0) FROM cut) AS may_skip
    FROM left_over l CROSS JOIN unacked u CROSS JOIN total t CROSS JOIN looked o
), verdict AS MATERIALIZED (
    SELECT CASE
        WHEN NOT EXISTS (SELECT FROM k) THEN 'unknown'
        WHEN $3::text = 'id' AND NOT EXISTS (SELECT FROM eras e WHERE e.era = now.to_era) THEN 'era'
        WHEN $3::text = 'id' AND now.to_era = now.era AND $5::bigint - 1 > now.top THEN 'beyond'
        WHEN $8::boolean AND NOT $9::boolean AND (n.skipped > 0 OR NOT n.skips_known AND n.may_skip) THEN 'skips'
        ELSE '' END AS problem
    FROM now CROSS JOIN counted n
), go AS MATERIALIZED (
    SELECT $8::boolean AND v.problem = '' AS now FROM verdict v
), place AS MATERIALIZED (
    SELECT now.era,
           CASE WHEN w.step = 'idle' THEN now.c ELSE '1:1:'::pg_snapshot END AS p,
           CASE WHEN w.step = 'idle' THEN now.top ELSE 0 END AS floor,
           w.step,
           CASE WHEN w.step = 'main' THEN now.c END AS c,
           CASE WHEN w.step = 'main' THEN now.top ELSE 0 END AS top,
           CASE WHEN w.step = 'main' THEN greatest(own.id - 1, 0) ELSE 0 END AS at,
           w.past
    FROM now
    JOIN cut own ON own.own
    CROSS JOIN LATERAL (
        SELECT CASE WHEN b.past THEN 'past' WHEN own.id = 9223372036854775807 THEN 'idle' ELSE 'main' END AS step,
               coalesce((
                   SELECT jsonb_object_agg(o.era, CASE
                       WHEN o.id = 9223372036854775807 THEN jsonb_build_object('p', '4611686018427387907:4611686018427387907:')
                       ELSE jsonb_build_object('p', '1:1:', 'c', '4611686018427387907:4611686018427387907:', 'at', o.id - 1) END)
                   FROM cut o WHERE NOT o.own AND o.id > 0), '{}') AS past
        FROM begin b
    ) AS w
), moved AS (
    UPDATE outbox.cursors c
    SET era = v.era, p = v.p, floor = v.floor, step = v.step, c = v.c, top = v.top, at = v.at, at_era = 0, holes = '[]',
        past = v.past, ahead = '[]', reach = 0, epoch = c.epoch + 1, updated_at = now()
    FROM place v CROSS JOIN go
    WHERE go.now AND c.consumer_group = $1::text AND c.topic = $2::text AND c.until IS NULL
), ended AS (
    DELETE FROM outbox.cursors c USING go
    WHERE go.now AND c.consumer_group = $1::text AND c.topic = $2::text AND c.until IS NOT NULL AND c.holder IS NULL
), ending AS (
    UPDATE outbox.cursors c
    SET era = now.era, p = now.c, floor = now.top, step = 'idle', c = NULL, top = 0, at = 0, at_era = 0, holes = '[]', ahead = '[]', reach = 0,
        past = coalesce((
            SELECT jsonb_object_agg(e.era, jsonb_build_object('p', '4611686018427387907:4611686018427387907:')) FROM eras e WHERE e.era <> now.era), '{}'),
        epoch = c.epoch + 1, updated_at = now()
    FROM now CROSS JOIN go
    WHERE go.now AND c.consumer_group = $1::text AND c.topic = $2::text AND c.until IS NOT NULL AND c.holder IS NOT NULL
), dropped AS (
    DELETE FROM outbox.deferred d USING go, waiting w
    WHERE go.now AND $10::boolean AND d.id = w.id
    RETURNING d.id
), logged AS (
    INSERT INTO outbox.group_log (action, actor, reason, consumer_group, topic, detail)
    SELECT 'moved', coalesce(nullif($11::text, ''), current_user::text), $12::text, $1::text, $2::text,
           jsonb_build_object('to', $3::text, 'era', CASE WHEN $3::text = 'id' THEN now.to_era END, 'id', CASE WHEN $3::text = 'id' THEN $5::bigint END,
               'time', CASE WHEN $3::text = 'time' THEN $6::timestamptz END, 'again', n.again, 'skipped', n.skipped, 'exact', n.exact,
               'retries', CASE WHEN $10::boolean THEN (SELECT count(*) FROM waiting) ELSE 0 END,
               'before', (SELECT jsonb_agg(jsonb_build_object('shard', c.shard, 'p', c.p::text, 'floor', c.floor, 'step', c.step, 'c', c.c::text, 'at', c.at, 'era', c.era) ORDER BY c.shard)
                   FROM (SELECT c.* FROM outbox.cursors c WHERE c.consumer_group = $1::text AND c.topic = $2::text ORDER BY c.shard LIMIT 16) AS c))
    FROM go CROSS JOIN now CROSS JOIN counted n WHERE go.now
)
SELECT v.problem, n.again, n.skipped, n.exact, (SELECT count(*) FROM waiting), now.top,
       coalesce((SELECT array_agg(DISTINCT k.holder) FROM k WHERE k.holder IS NOT NULL), '{}')
FROM verdict v CROSS JOIN counted n CROSS JOIN now
