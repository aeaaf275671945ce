-- Moves what is due into the log, in the order of its due times, and says how
-- long it is until the next is due.
--
-- $1 the advisory lock, $2 rows and $3 bytes at most, ($4, $5) what the rows
-- come after, as due_at and id
--
-- The log's ids are drawn as the rows pass, sorted, so they are in that order
-- too. The lock, which ends with the statement, keeps two processes from drawing
-- them by turns. The snapshot is older than the lock: what the process before
-- has moved is still in it, but cannot be locked any more and is left out.
--
-- Both scans begin inside the index: at the place given, and at the present. The
-- entries of rows that were moved stay in front of them until the next vacuum.
-- The rows are found again by their ids in an array, since no statistics make a
-- walk through the table of that.
WITH mine AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock($1::bigint) AS locked
), due AS MATERIALIZED (
    SELECT d.id, d.due_at, coalesce(octet_length(d.payload), 0) + pg_column_size(d.metadata) AS size
    FROM outbox.deferred d
    WHERE (SELECT m.locked FROM mine m)
        AND (d.due_at, d.id) > ($4::timestamptz, $5::bigint) AND d.due_at <= statement_timestamp()
    ORDER BY d.due_at, d.id
    LIMIT $2::int
    FOR UPDATE OF d SKIP LOCKED
), gone AS (
    DELETE FROM outbox.deferred d
    WHERE d.id = ANY (ARRAY(
        SELECT s.id FROM (
            SELECT f.id, sum(f.size) OVER (ORDER BY f.due_at, f.id) - f.size AS before FROM due f
        ) AS s
        WHERE s.before < $3::bigint))
    RETURNING d.id, d.due_at, d.topic, d.key, d.uuid, d.metadata, d.payload, d.target_group, d.attempt
), put AS (
    INSERT INTO outbox.messages (topic, key, uuid, metadata, payload, target_group, attempt)
    SELECT g.topic, g.key, g.uuid, g.metadata, g.payload, g.target_group, g.attempt
    FROM gone g
    ORDER BY g.due_at, g.id
)
SELECT mine.locked, counted.due::int, counted.gone::int, last.due_at, last.id, statement_timestamp(),
       (SELECT (extract(epoch FROM d.due_at) - extract(epoch FROM clock_timestamp()))::float8
           FROM outbox.deferred d
           WHERE (SELECT m.locked FROM mine m) AND d.due_at > statement_timestamp()
           ORDER BY d.due_at LIMIT 1),
       extract(epoch FROM clock_timestamp() - statement_timestamp())::float8
FROM mine
CROSS JOIN (SELECT (SELECT count(*) FROM due) AS due, (SELECT count(*) FROM gone) AS gone) AS counted
LEFT JOIN LATERAL (SELECT g.due_at, g.id FROM gone g ORDER BY g.due_at DESC, g.id DESC LIMIT 1) AS last ON true
