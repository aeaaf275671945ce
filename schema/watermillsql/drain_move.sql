-- Moves them and the position, and counts.
, call AS MATERIALIZED (
    SELECT r.*, r.due::timestamptz AS due_at, coalesce(r.due::timestamptz > clock_timestamp(), false) AS waits FROM rows r
), advanced AS (
    UPDATE :offsets o SET offset_acked = last.n, last_processed_transaction_id = last.transaction_id
    FROM (SELECT c.transaction_id, c.n FROM call c ORDER BY c.transaction_id DESC, c.n DESC LIMIT 1) AS last
    WHERE o.consumer_group = $7::text
), waiting AS (
    INSERT INTO outbox.deferred (due_at, topic, key, uuid, metadata, payload)
    SELECT c.due_at, c.topic, c.key, c.uuid, c.metadata, c.payload FROM call c WHERE c.waits ORDER BY c.transaction_id, c.n
), written AS (
    INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
    SELECT c.topic, c.key, c.uuid, c.metadata, c.payload FROM call c WHERE NOT c.waits ORDER BY c.transaction_id, c.n
)
SELECT count(*), count(*) FILTER (WHERE c.waits) FROM call c
