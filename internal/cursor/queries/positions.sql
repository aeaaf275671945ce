-- What positions say, to be counted by: for the rows of the server's own era, P
-- and the open window (C, and up to which id of it was handed out), and for those
-- of others what is known of each, as past.sql of package window takes it. A
-- position of another era is read as it will be when its reader enters this one.
-- A part of other statements, which have a table now (era, c).
SELECT c.consumer_group, c.topic, c.patterns, c.shard, c.base, c.shards, c.reshard, c.until, c.until_era, c.holes, c.holder,
       c.updated_at, now.era AS e, now.c AS now,
       CASE WHEN c.era = now.era THEN c.p ELSE coalesce(c.past -> now.era::text ->> 'p', '1:1:')::pg_snapshot END AS p,
       CASE WHEN c.era = now.era THEN c.c END AS c, c.top, w.upto,
       ARRAY(
           SELECT (a.row ->> 0)::bigint
           FROM jsonb_array_elements(
               CASE WHEN c.era = now.era THEN c.ahead ELSE coalesce(c.past -> now.era::text -> 'ahead', '[]') END) AS a (row)
       ) AS ahead,
       CASE WHEN c.era = now.era THEN c.past
           ELSE c.past || jsonb_build_object(c.era::text, jsonb_build_object('p', c.p::text, 'c', c.c::text, 'at', w.upto, 'ahead', c.ahead))
       END AS known,
       c.step = 'past' OR c.era <> now.era AS open,
       CASE WHEN c.step = 'past' AND c.era = now.era AND c.at > 0 THEN c.at_era ELSE -9223372036854775808 END AS open_era,
       CASE WHEN c.step = 'past' AND c.era = now.era THEN c.at ELSE 0 END AS open_id
FROM outbox.cursors c CROSS JOIN now
CROSS JOIN LATERAL (
    SELECT CASE c.step WHEN 'main' THEN greatest(c.floor, c.at) WHEN 'late' THEN c.at ELSE 0 END AS upto
) AS w
