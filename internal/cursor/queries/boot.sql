-- Marks this life of the server, unless somebody has.
INSERT INTO outbox.boot DEFAULT VALUES ON CONFLICT DO NOTHING
