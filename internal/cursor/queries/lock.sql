-- Locks a group's cursors of a topic: no position of theirs can be stored, and
-- none be taken, until the end of the transaction. Whoever has locked one now
-- changes something, so there is another time to try.
--
-- $1 group, $2 topic
SELECT c.shard FROM outbox.cursors c
WHERE c.consumer_group = $1::text AND c.topic = $2::text
ORDER BY c.shard FOR UPDATE NOWAIT
