-- Says what the process wants: with how many subscriptions, 0 for no longer.
--
-- $1 holder, $2 groups, $3 topics, $4 subscriptions
WITH want AS MATERIALIZED (
    SELECT w.consumer_group, w.topic, w.subscriptions
    FROM unnest($2::text[], $3::text[], $4::integer[]) AS w (consumer_group, topic, subscriptions)
), gone AS (
    DELETE FROM outbox.members m USING want w
    WHERE m.consumer_group = w.consumer_group AND m.topic = w.topic AND m.holder = $1::text AND w.subscriptions = 0
)
INSERT INTO outbox.members (holder, consumer_group, topic, subscriptions)
SELECT $1::text, w.consumer_group, w.topic, w.subscriptions FROM want w WHERE w.subscriptions > 0
ON CONFLICT (consumer_group, topic, holder) DO UPDATE SET subscriptions = excluded.subscriptions
