-- Asks for another number of shards; the number that there is takes an earlier
-- wish back. Cursors that end already are not concerned.
--
-- $1 group, $2 topic, $3 shards
WITH newest AS MATERIALIZED (
    SELECT c.shard FROM outbox.cursors c
    WHERE c.consumer_group = $1::text AND c.topic = $2::text AND c.until IS NULL
    ORDER BY c.shard FOR UPDATE
)
UPDATE outbox.cursors c SET reshard = nullif($3::integer, c.shards), updated_at = now()
FROM newest
WHERE c.consumer_group = $1::text AND c.topic = $2::text AND c.shard = newest.shard AND c.until IS NULL
