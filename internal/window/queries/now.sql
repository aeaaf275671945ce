-- The snapshot of this statement, the last id drawn by then, and the life of
-- the server both belong to.
SELECT outbox.era(), (SELECT b.life::text FROM outbox.boot b), pg_current_snapshot()::text,
       (SELECT s.last_value FROM outbox.messages_id_seq s)
