-- Locks a group's cursors, of all topics or of one, see lock.sql.
--
-- $1 group, $2 all topics, $3 or this one
SELECT c.shard FROM outbox.cursors c
WHERE c.consumer_group = $1::text AND ($2::boolean OR c.topic = $3::text)
ORDER BY c.topic, c.shard FOR UPDATE NOWAIT
