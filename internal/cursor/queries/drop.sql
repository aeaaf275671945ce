-- Removes a group's cursors, and what waits to be delivered to it again; or only
-- says what there is. The caller has locked the cursors in an earlier statement if
-- they are to be removed: what was deferred by then is seen here, and no holder
-- can defer anything later, for it finds no cursor.
--
-- A process that lives stays among the members: it is one until it unsubscribes.
--
-- $1 group, $2 all topics, $3 or this one, $4 remove, $5 although somebody is
-- subscribed, $6 for how many seconds a beat counts, $7 actor, $8 reason
WITH living AS MATERIALIZED (
    SELECT p.holder, p.host, p.pid, clock_timestamp() - p.beat_at AS silent FROM outbox.processes p
    WHERE p.beat_at > clock_timestamp() - make_interval(secs => $6::float8)
), old AS MATERIALIZED (
    SELECT c.consumer_group, c.topic, c.shard, c.holder FROM outbox.cursors c
    WHERE c.consumer_group = $1::text AND ($2::boolean OR c.topic = $3::text)
), member AS MATERIALIZED (
    SELECT m.holder, m.topic FROM outbox.members m
    WHERE m.consumer_group = $1::text AND ($2::boolean OR m.topic = $3::text)
), subscribed AS MATERIALIZED (
    SELECT w.holder, l.host, l.pid, w.topic
    FROM (SELECT m.holder, m.topic FROM member m UNION SELECT o.holder, o.topic FROM old o) AS w
    JOIN living l ON l.holder = w.holder
), waiting AS MATERIALIZED (
    SELECT d.id FROM outbox.deferred d
    WHERE d.target_group = $1::text
        AND ($2::boolean OR d.topic = $3::text
            OR $3::text = '' AND d.topic LIKE ANY (
                SELECT unnest(c.patterns) FROM outbox.cursors c WHERE c.consumer_group = $1::text AND c.topic = ''))
), verdict AS MATERIALIZED (
    SELECT CASE
        WHEN NOT EXISTS (SELECT FROM old) THEN 'unknown'
        WHEN $4::boolean AND NOT $5::boolean AND EXISTS (SELECT FROM subscribed) THEN 'subscribed'
        ELSE '' END AS problem
), go AS MATERIALIZED (
    SELECT FROM verdict v WHERE $4::boolean AND v.problem = ''
), gone AS (
    DELETE FROM outbox.cursors c USING go
    WHERE c.consumer_group = $1::text AND ($2::boolean OR c.topic = $3::text)
), unwanted AS (
    DELETE FROM outbox.members m USING go
    WHERE m.consumer_group = $1::text AND ($2::boolean OR m.topic = $3::text)
        AND NOT EXISTS (SELECT FROM living l WHERE l.holder = m.holder)
), dropped AS (
    DELETE FROM outbox.deferred d USING go, waiting w WHERE d.id = w.id
), forgotten AS (
    DELETE FROM outbox.inbox i USING go WHERE i.consumer_group = $1::text AND $2::boolean
), logged AS (
    INSERT INTO outbox.group_log (action, actor, reason, consumer_group, topic, detail)
    SELECT 'dropped', coalesce(nullif($7::text, ''), current_user::text), $8::text, $1::text, o.topic,
           jsonb_build_object('shards', count(*), 'forced', EXISTS (SELECT FROM subscribed s WHERE s.topic = o.topic))
    FROM go CROSS JOIN old o GROUP BY o.topic ORDER BY o.topic
)
SELECT v.problem, (SELECT count(DISTINCT o.topic) FROM old o), (SELECT count(*) FROM old), (SELECT count(*) FROM waiting),
       coalesce((SELECT jsonb_agg(jsonb_build_object('holder', s.holder, 'host', s.host, 'pid', s.pid, 'topic', s.topic) ORDER BY s.topic, s.holder)
           FROM (SELECT * FROM subscribed s ORDER BY s.topic, s.holder LIMIT 100) AS s), '[]')::text
FROM verdict v
