-- Ends the process: gives up whatever it still holds and removes its rows.
--
-- $1 holder
WITH released AS (
    UPDATE outbox.cursors SET holder = NULL, updated_at = now() WHERE holder = $1::text
), wanted AS (
    DELETE FROM outbox.members WHERE holder = $1::text
)
DELETE FROM outbox.processes WHERE holder = $1::text
