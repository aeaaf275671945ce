-- The row that is to be moved next, when rows are moved one by one. It is not
-- kept locked: should it be refused, nothing is left of that transaction.
--
-- ($1, $2) what the row comes after, as due_at and id
SELECT d.id, d.due_at, d.topic, d.uuid, d.failures
FROM outbox.deferred d
WHERE (d.due_at, d.id) > ($1::timestamptz, $2::bigint) AND d.due_at <= statement_timestamp()
ORDER BY d.due_at, d.id
LIMIT 1
FOR UPDATE OF d SKIP LOCKED
