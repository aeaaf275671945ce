-- Makes the cursor row unless it is there. The statement's own snapshot decides
-- what "latest" means, so the position is fixed when it returns.
--
-- $1 group, $2 topic, $3 shard, $4 start at the latest instead of the earliest
INSERT INTO outbox.cursors (consumer_group, topic, shard, era, p, floor, step)
SELECT $1::text, $2::text, $3::integer, outbox.era(),
       CASE WHEN $4::boolean THEN pg_current_snapshot() ELSE '1:1:'::pg_snapshot END,
       CASE WHEN $4::boolean THEN (SELECT s.last_value FROM outbox.messages_id_seq s) ELSE 0 END,
       CASE WHEN $4::boolean THEN 'idle' ELSE 'past' END
ON CONFLICT (consumer_group, topic, shard) DO NOTHING
