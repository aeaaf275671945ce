-- The rows of an old table that a group has not had, as rows of the outbox; what
-- is done with them follows in the other files. The places that begin with a
-- colon are the two old tables, the expression for the payload's bytes, and which
-- of the two readings of them is meant.
--
-- Only rows below the horizon (the fourth parameter), under which no transaction runs any more, as
-- watermill-sql itself does it. A transaction that got its id before others and
-- comes to write here after them has a row below theirs: had the position passed
-- it, nobody would ever look there again.
WITH pending AS (
    SELECT m.transaction_id, m."offset" AS n, m.uuid::text AS uuid, :payload AS payload, m.metadata::json AS metadata
    FROM :messages m, :offsets o
    WHERE o.consumer_group = $2::text
        AND (m.transaction_id, m."offset") > (o.last_processed_transaction_id, coalesce(o.offset_acked, 0))
        AND m.transaction_id < $4::text::xid8
    ORDER BY m.transaction_id, m."offset"
    LIMIT nullif($5::bigint, 0)
), plain AS (
    SELECT p.transaction_id, p.n, $1::text AS topic, p.uuid, p.payload, p.metadata FROM pending p
), unwrapped AS (
    SELECT e.transaction_id, e.n, e.envelope ->> 'destination_topic' AS topic, coalesce(e.envelope ->> 'uuid', '') AS uuid,
           decode(e.envelope ->> 'payload', 'base64') AS payload, e.envelope -> 'metadata' AS metadata
    FROM (SELECT p.transaction_id, p.n, convert_from(p.payload, 'UTF8')::json AS envelope FROM pending p) e
), rows AS MATERIALIZED (
    SELECT r.transaction_id, r.n, r.topic, r.uuid, r.payload, m.metadata, nullif(m.metadata ->> $3::text, '') AS key,
           nullif(m.metadata ->> '_watermill_delayed_until', '') AS due
    FROM :source r
    -- watermill-sql writes null for metadata that were never made.
    CROSS JOIN LATERAL (SELECT CASE WHEN json_typeof(r.metadata) = 'null' THEN '{}' ELSE coalesce(r.metadata, '{}') END) AS m (metadata)
)
