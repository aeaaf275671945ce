-- Notes that a row could not be moved, and when it is to be tried again. Nothing
-- is noted if another process has done so since the row was looked at.
--
-- $1 the row, $2 its failures then, $3 seconds until the next attempt, $4 why
UPDATE outbox.deferred d
SET failures = d.failures + 1, error = $4::text, due_at = clock_timestamp() + make_interval(secs => $3::float8)
WHERE d.id = $1::bigint AND d.failures = $2::int
RETURNING d.failures
