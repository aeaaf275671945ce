-- The rows of an old table that a group has not had, as rows of the outbox; what
-- is done with them follows in the other files. The places that begin with a
-- colon are the two old tables, the expression for the payload's bytes, and which
-- of the two readings of them is meant.
--
-- Only rows below the horizon (the third parameter), under which no transaction
-- runs any more, as watermill-sql itself does it. A transaction that got its id
-- before others and comes to write here after them has a row below theirs: had
-- the position passed it, nobody would ever look there again.
WITH pending AS (
    SELECT m.transaction_id, m."offset" AS n, m.uuid::text AS uuid, :payload AS payload, m.metadata::json AS metadata
    FROM (
        -- Bounds that are values make this a range of the primary key, whatever
        -- lies behind it.
        SELECT * FROM :messages m
        WHERE (m.transaction_id, m."offset") > ($5::text::xid8, $6::bigint) AND m.transaction_id < $3::text::xid8
        ORDER BY m.transaction_id, m."offset"
        LIMIT nullif($4::bigint, 0)
    ) AS m
), plain AS (
    SELECT p.transaction_id, p.n, $1::text AS topic, p.uuid, p.payload, p.metadata FROM pending p
), unwrapped AS MATERIALIZED (
    -- Once for each row: JSON is read from its text each time.
    SELECT p.transaction_id, p.n, e.destination_topic AS topic, coalesce(e.uuid, '') AS uuid, decode(e.payload, 'base64') AS payload, e.metadata
    FROM (SELECT p.transaction_id, p.n, convert_from(p.payload, 'UTF8')::json AS envelope FROM pending p OFFSET 0) AS p
    CROSS JOIN LATERAL json_to_record(CASE json_typeof(p.envelope) WHEN 'object' THEN p.envelope ELSE '{}' END)
        AS e (destination_topic text, uuid text, payload text, metadata json)
), rows AS MATERIALIZED (
    SELECT r.transaction_id, r.n, r.topic, r.uuid, r.payload, m.metadata, nullif(m.metadata ->> $2::text, '') AS key,
           nullif(m.metadata ->> '_watermill_delayed_until', '') AS due
    FROM :source r
    -- watermill-sql writes null for metadata that were never made.
    CROSS JOIN LATERAL (SELECT CASE WHEN json_typeof(r.metadata) = 'null' THEN '{}' ELSE coalesce(r.metadata, '{}') END OFFSET 0) AS m (metadata)
)
