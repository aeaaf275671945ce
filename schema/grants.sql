-- The least each part needs. A part's line names it, or those that share it.

-- part: all
REVOKE ALL ON SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA outbox FROM PUBLIC;

-- part: owner
ALTER SCHEMA outbox OWNER TO :role;
DO $body$
DECLARE
    object record;
    maker oid := (
        SELECT c.relowner FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = :schema AND c.relname = 'messages');
BEGIN
    FOR object IN
        SELECT c.relname, c.relkind FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = :schema AND c.relkind IN ('r', 'p')
            AND c.relowner <> (SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = :role_literal)
    LOOP
        EXECUTE format('ALTER TABLE %I.%I OWNER TO %I', :schema, object.relname, :role_literal);
    END LOOP;
    -- The publication goes along if it came with the tables: the same role made
    -- both, and it publishes them by name. Another one is somebody else's, or an
    -- administrator's, and nothing needs it to change hands. Neither does this
    -- one, so where the server would refuse it stays, too.
    IF EXISTS (
        SELECT FROM pg_catalog.pg_publication p
        JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid
        JOIN pg_catalog.pg_class c ON c.oid = r.prrelid AND c.relname = 'messages'
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.nspname = :schema
        WHERE p.pubname = :schema AND p.pubowner = maker
            AND p.pubowner <> (SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = :role_literal)
            AND (pg_catalog.has_database_privilege(:role_literal, pg_catalog.current_database(), 'CREATE')
                OR (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user))
    ) THEN
        EXECUTE format('ALTER PUBLICATION %I OWNER TO %I', :schema, :role_literal);
    END IF;
END $body$;
DO $body$
DECLARE
    function regprocedure;
BEGIN
    FOR function IN
        SELECT p.oid::regprocedure FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = :schema AND p.proowner <> (SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = :role_literal)
            AND (p.proname IN ('era', 'shard', 'publish') OR p.proname LIKE 'upkeep%')
    LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', function, :role_literal);
    END LOOP;
END $body$;

-- part: publisher
-- INSERT on columns, never on the table: whoever may set xid, era or
-- created_at can hide messages from every reader.
GRANT USAGE ON SCHEMA outbox TO :role;
GRANT SELECT ON outbox.meta TO :role;
GRANT INSERT (topic, key, uuid, metadata, payload) ON outbox.messages TO :role;
GRANT INSERT (due_at, topic, key, uuid, metadata, payload) ON outbox.deferred TO :role;
GRANT EXECUTE ON FUNCTION outbox.era(), outbox.publish(text, bytea, json, text, text, timestamptz) TO :role;
-- It stands in a constraint that is at times on the DEFAULT partition, and is called
-- with the rights of whoever inserts there.
GRANT EXECUTE ON FUNCTION outbox.upkeep_passed(timestamptz) TO :role;

-- part: consumer
GRANT USAGE ON SCHEMA outbox TO :role;
GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO :role;
GRANT SELECT ON outbox.messages_id_seq TO :role;
GRANT INSERT, UPDATE, DELETE ON outbox.cursors, outbox.processes, outbox.members, outbox.boot, outbox.inbox TO :role;
GRANT INSERT, UPDATE, DELETE ON outbox.deferred, outbox.dead_letters TO :role;
GRANT INSERT ON outbox.dead_letter_log, outbox.group_log TO :role;
GRANT INSERT (topic, key, uuid, metadata, payload, target_group, attempt) ON outbox.messages TO :role;
GRANT EXECUTE ON FUNCTION outbox.era(), outbox.shard(text, bigint, integer) TO :role;
-- To read the WAL the role that logs in needs REPLICATION besides. That lets it
-- copy the whole server, so it is not for this script to give: a superuser runs
-- the first line, or on Amazon RDS a member of rds_superuser the second.
-- ALTER ROLE :role_commented REPLICATION;
-- GRANT rds_replication TO :role_commented;
-- Optional: to see how long other roles' transactions have been open, and not to
-- open a stream that would have to wait for one.
-- GRANT pg_read_all_stats TO :role_commented;

-- part: upkeep
-- Reading, for archives and for what is to be told. All else is done by functions.
GRANT USAGE ON SCHEMA outbox TO :role;
GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO :role;

-- part: consumer upkeep
-- Upkeep: the functions do with the owner's rights what only the owner may, and
-- each looks whether its step loses anything.
GRANT EXECUTE ON FUNCTION
    outbox.upkeep_begin(text, double precision, double precision), outbox.upkeep_end(text, boolean), outbox.upkeep_sync(),
    outbox.upkeep_passed(timestamptz), outbox.upkeep_width(), outbox.upkeep_ranges(), outbox.upkeep_make(timestamptz, timestamptz), outbox.upkeep_guard(timestamptz, timestamptz),
    outbox.upkeep_validate(), outbox.upkeep_unguard(), outbox.upkeep_seal(text, double precision), outbox.upkeep_strays(text, integer), outbox.upkeep_identify(text),
    outbox.upkeep_look(text, double precision), outbox.upkeep_archived(text, pg_snapshot),
    outbox.upkeep_free(text, double precision, double precision, boolean), outbox.upkeep_drop(text),
    outbox.upkeep_delete(text, bigint, bigint, double precision, double precision, boolean, integer),
    outbox.upkeep_sweep(text, double precision, integer), outbox.upkeep_bury(text[], bigint[]), outbox.upkeep_note(text, text) TO :role;
