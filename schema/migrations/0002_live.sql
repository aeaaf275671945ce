-- What reading the write-ahead log needs: a place in the position for what went
-- out early, and a publication.

-- The log is read in commit order, and a position cannot see what committed
-- after it: rows that were handed out although p does not see them, as
-- [id, xid].
ALTER TABLE outbox.cursors
    ADD COLUMN ahead jsonb NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(ahead) = 'array');

-- Inserts are all that is read, and the root stands for its partitions: those
-- that are attached later are covered.
--
-- Polling needs no publication, so a role that may not create one (CREATE on
-- the database) still gets its tables. One that is there already may be an
-- administrator's work or somebody else's, and is left alone either way.
DO $body$
DECLARE
    statement text := format('CREATE PUBLICATION %I FOR TABLE %I.messages WITH (publish = %L, publish_via_partition_root = true)',
        :schema, :schema, 'insert');
BEGIN
    EXECUTE statement;
EXCEPTION
    WHEN insufficient_privilege THEN
        RAISE WARNING USING
            MESSAGE = format('outbox: role %I may not create the publication, so subscribers poll and cannot read the WAL', current_user),
            DETAIL = SQLERRM,
            HINT = 'Run as a superuser, or as the owner of the tables with CREATE on the database: ' || statement;
    WHEN duplicate_object THEN
        RAISE NOTICE USING
            MESSAGE = format('outbox: publication %I exists already and is left as it is', :schema),
            HINT = 'Unless schema.Check finds fault with it, it will do. What it should be: ' || statement;
END $body$;

-- Where somebody publishes all tables of the database, a row can be deleted only
-- from a table that says how subscribers find the row. The rows of this
-- partition are deleted one by one, and it has no primary key. Other partitions
-- are only truncated and dropped, which takes no such thing, so new ones need
-- nothing; the other tables have primary keys. FULL, since a unique index would
-- be one more for the planner to read by, and it does. The price: a subscriber of
-- PostgreSQL's own cannot apply such a delete, for json has no equality.
--
-- Last, because it locks out readers until the commit.
ALTER TABLE outbox.messages_default REPLICA IDENTITY FULL;
