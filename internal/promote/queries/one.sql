-- Moves one row into the log, unless somebody else did or is about to. Says
-- whether the lock was to be had.
--
-- $1 the advisory lock, $2 the row
WITH mine AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock($1::bigint) AS locked
), due AS MATERIALIZED (
    SELECT d.id FROM outbox.deferred d
    WHERE (SELECT m.locked FROM mine m) AND d.id = $2::bigint AND d.due_at <= statement_timestamp()
    FOR UPDATE OF d SKIP LOCKED
), gone AS (
    DELETE FROM outbox.deferred d
    WHERE d.id = ANY (ARRAY(SELECT f.id FROM due f))
    RETURNING d.topic, d.key, d.uuid, d.metadata, d.payload, d.target_group, d.attempt
), put AS (
    INSERT INTO outbox.messages (topic, key, uuid, metadata, payload, target_group, attempt)
    SELECT g.topic, g.key, g.uuid, g.metadata, g.payload, g.target_group, g.attempt
    FROM gone g
)
SELECT m.locked FROM mine m
