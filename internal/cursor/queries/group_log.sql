-- A page of what was done to groups.
--
-- $1 group or '', $2 after this id, $3 so many
SELECT l.id, l.at, l.action, l.actor, l.reason, l.consumer_group, l.topic, l.detail::text FROM outbox.group_log l
WHERE ($1::text = '' OR l.consumer_group = $1::text) AND l.id > $2::bigint
ORDER BY l.id LIMIT $3::bigint
