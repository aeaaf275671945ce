-- Whether a group has cursors of a topic.
--
-- $1 group, $2 topic
SELECT EXISTS (SELECT FROM outbox.cursors c WHERE c.consumer_group = $1::text AND c.topic = $2::text)
