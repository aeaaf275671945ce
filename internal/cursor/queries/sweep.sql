-- Gives up the cursors that the process holds in the table and nobody in it
-- holds or waits for. Their positions stay as they are.
--
-- $1 holder, $2 groups, $3 topics, $4 shards of those to keep
UPDATE outbox.cursors c SET holder = NULL, updated_at = now()
WHERE c.holder = $1::text AND NOT EXISTS (
    SELECT FROM unnest($2::text[], $3::text[], $4::integer[]) AS k (consumer_group, topic, shard)
    WHERE c.consumer_group = k.consumer_group AND c.topic = k.topic AND c.shard = k.shard)
