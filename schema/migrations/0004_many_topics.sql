-- What one cursor over many topics needs.

-- Which topics a cursor is over: those that match one of these patterns (of
-- LIKE), where topic is ''; of one topic NULL.
ALTER TABLE outbox.cursors
    ADD COLUMN patterns text[] COLLATE "C",
    ADD CHECK ((topic = '') = (patterns IS NOT NULL));

-- The rows of all topics: the main rows of a window, those of other eras and the
-- holes by the first index, the late ones by the second. Of expressions that change
-- nothing, so that whoever reads one topic cannot be given these by the planner;
-- see internal/window/reader.go.
--
-- Publishers wait while an index is built, so it is done at once, where there is
-- nothing to wait for and little to read, or left to somebody who chooses the time.
-- Only those who read many topics by one cursor need the indexes, and they are
-- slow without them.
DO $body$
DECLARE
    bytes bigint := (
        SELECT coalesce(sum(pg_catalog.pg_relation_size(i.inhrelid)), 0) FROM pg_catalog.pg_inherits i
        WHERE i.inhparent = (
            SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = :schema AND c.relname = 'messages'));
    statements text[] := ARRAY[
        format('CREATE INDEX messages_id ON %I.messages ((era + 0), (id + 0))', :schema),
        format('CREATE INDEX messages_xid ON %I.messages (nullif(xid, %L::xid8), (id + 0))', :schema, '0')];
BEGIN
    IF bytes > 100 * 1024 * 1024 THEN
        RAISE WARNING USING
            MESSAGE = format('outbox: %s bytes of messages are stored, so two indexes are not built now', bytes),
            DETAIL = 'Publishers would wait. Without them, reading many topics by one cursor is slow.',
            HINT = 'At a quiet time run: ' || array_to_string(statements, '; ');
        RETURN;
    END IF;
    LOCK TABLE outbox.messages IN SHARE MODE NOWAIT;
    EXECUTE statements[1];
    EXECUTE statements[2];
EXCEPTION
    WHEN lock_not_available THEN
        RAISE WARNING USING
            MESSAGE = 'outbox: publishers are at work, so two indexes are not built now',
            DETAIL = 'They would have to wait. Without them, reading many topics by one cursor is slow.',
            HINT = 'At a quiet time run: ' || array_to_string(statements, '; ');
END $body$;
