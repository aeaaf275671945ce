-- Which of the topics have rows that the snapshot W could not see? The answer
-- comes with the statement's own snapshot, which is the next W. And is there a
-- cursor that nobody holds, of those that would be taken?
--
-- $1 topics, $2 W, $3 groups and $4 topics of cursors, $5 patterns of topics that
-- some read together: is there anything new for them?
--
-- The transactions that ended since W are those of xip(W) that are no longer
-- running and those in [xmax(W), xmax(now)) that are not running, as gaps
-- between the running ones. A row of theirs that this statement sees is new.
WITH now AS MATERIALIZED (
    SELECT pg_current_snapshot() AS c, $2::text::pg_snapshot AS w
), gap AS MATERIALIZED (
    SELECT b.low, b.high FROM (
        SELECT lag(e.x) OVER (ORDER BY e.x) AS low, e.x AS high FROM (
            SELECT (pg_snapshot_xmax(now.w)::text::numeric - 1)::text::xid8 FROM now
            UNION ALL
            SELECT x FROM now, pg_snapshot_xip(now.c) x WHERE x >= pg_snapshot_xmax(now.w)
            UNION ALL
            SELECT pg_snapshot_xmax(now.c) FROM now
        ) AS e (x)
    ) AS b
    WHERE b.low < b.high AND (b.high::text::numeric - b.low::text::numeric) > 1
), ended AS MATERIALIZED (
    SELECT x AS xid FROM now, pg_snapshot_xip(now.w) x WHERE pg_visible_in_snapshot(x, now.c)
)
SELECT outbox.era(), (SELECT b.life::text FROM outbox.boot b), now.c::text,
       (SELECT s.last_value FROM outbox.messages_id_seq s),
       ARRAY(
           SELECT t.topic FROM unnest($1::text[]) AS t (topic)
           WHERE EXISTS (
               SELECT FROM gap CROSS JOIN LATERAL (
                   SELECT FROM outbox.messages m
                   WHERE m.topic = t.topic AND m.xid > gap.low AND m.xid < gap.high:recent
                   LIMIT 1
               ) AS r)
           OR EXISTS (
               SELECT FROM ended CROSS JOIN LATERAL (
                   SELECT FROM outbox.messages m
                   WHERE m.topic = t.topic AND m.xid = ended.xid:recent
                   LIMIT 1
               ) AS r)
       ),
       -- The expressions are those of the indexes over all topics, see reader.go
       -- of package window.
       cardinality($5::text[]) > 0 AND (
           EXISTS (
               SELECT FROM gap CROSS JOIN LATERAL (
                   SELECT FROM outbox.messages m
                   WHERE nullif(m.xid, '0'::xid8) > gap.low AND nullif(m.xid, '0'::xid8) < gap.high AND m.topic LIKE ANY ($5::text[]):recent
                   LIMIT 1
               ) AS r)
           OR EXISTS (
               SELECT FROM ended CROSS JOIN LATERAL (
                   SELECT FROM outbox.messages m
                   WHERE nullif(m.xid, '0'::xid8) = ended.xid AND m.topic LIKE ANY ($5::text[]):recent
                   LIMIT 1
               ) AS r)
       ),
       EXISTS (
           SELECT FROM unnest($3::text[], $4::text[]) AS s (consumer_group, topic)
           JOIN outbox.cursors u ON u.consumer_group = s.consumer_group AND u.topic = s.topic
           WHERE u.holder IS NULL AND NOT EXISTS (
               SELECT FROM outbox.cursors o
               WHERE o.consumer_group = u.consumer_group AND o.topic = u.topic AND o.base < u.base)),
       :spare
FROM now
