-- The cursors of topics, with the beats of their holders, and the living
-- members that want them. Of topics without shards the members are of no
-- interest.
--
-- $1 groups, $2 topics, $3 the caller, $4 all, instead of the free cursors alone
WITH wanted AS MATERIALIZED (
    SELECT w.consumer_group, w.topic FROM unnest($1::text[], $2::text[]) AS w (consumer_group, topic)
)
SELECT c.consumer_group, c.topic, c.shard, c.base, c.shards, c.until IS NOT NULL, coalesce(c.reshard, 0), 0,
       coalesce(c.holder, ''), p.beat, c.patterns
FROM wanted w
JOIN outbox.cursors c ON c.consumer_group = w.consumer_group AND c.topic = w.topic
LEFT JOIN outbox.processes p ON p.holder = c.holder
WHERE $4::boolean OR c.holder IS NULL OR c.holder = $3::text OR p.holder IS NULL
UNION ALL
SELECT m.consumer_group, m.topic, 0, 0, 0, false, 0, m.subscriptions, m.holder, p.beat, NULL
FROM wanted w
JOIN outbox.members m ON m.consumer_group = w.consumer_group AND m.topic = w.topic
JOIN outbox.processes p ON p.holder = m.holder
WHERE $4::boolean AND EXISTS (
    SELECT FROM outbox.cursors c WHERE c.consumer_group = w.consumer_group AND c.topic = w.topic AND c.shards > 1)
