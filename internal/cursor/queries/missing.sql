-- Those of the wanted cursors that do not exist.
--
-- $1 groups, $2 topics, $3 shards
SELECT w.consumer_group, w.topic, w.shard
FROM unnest($1::text[], $2::text[], $3::integer[]) AS w (consumer_group, topic, shard)
WHERE NOT EXISTS (
    SELECT FROM outbox.cursors c
    WHERE c.consumer_group = w.consumer_group AND c.topic = w.topic AND c.shard = w.shard)
