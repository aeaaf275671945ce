-- The beats of those who hold what the caller wants.
--
-- $1 groups, $2 topics, $3 shards, $4 the caller
SELECT p.holder, p.beat FROM outbox.processes p
WHERE p.holder <> $4::text AND p.holder IN (
    SELECT c.holder FROM outbox.cursors c
    JOIN unnest($1::text[], $2::text[], $3::integer[]) AS w (consumer_group, topic, shard)
        ON c.consumer_group = w.consumer_group AND c.topic = w.topic AND c.shard = w.shard)
