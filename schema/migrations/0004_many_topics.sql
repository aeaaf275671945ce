-- What one cursor over many topics needs.

-- Which topics a cursor is over: those that match one of these patterns (of
-- LIKE), where topic is ''; of one topic NULL.
ALTER TABLE outbox.cursors
    ADD COLUMN patterns text[] COLLATE "C",
    ADD CHECK ((topic = '') = (patterns IS NOT NULL));

-- The rows of all topics: the main rows of a window, those of other eras and the
-- holes by the first, the late ones by the second. Of expressions that change
-- nothing, so that whoever reads one topic cannot be given these by the planner;
-- see internal/window/reader.go.
CREATE INDEX messages_id ON outbox.messages ((era + 0), (id + 0));
CREATE INDEX messages_xid ON outbox.messages (nullif(xid, '0'::xid8), (id + 0));
