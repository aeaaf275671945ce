-- Whether a row is among the dead letters of a group.
--
-- $1 group, $2 era, $3 id
SELECT EXISTS (
    SELECT FROM outbox.dead_letters d
    WHERE d.consumer_group = $1::text AND d.origin_era = $2::bigint AND d.origin_id = $3::bigint)
