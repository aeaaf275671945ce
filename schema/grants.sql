-- The least each part needs. The first words of a part's line name it.

-- part: all
REVOKE ALL ON SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA outbox FROM PUBLIC;

-- part: owner
ALTER SCHEMA outbox OWNER TO :role;
DO $body$
DECLARE
    object record;
BEGIN
    FOR object IN
        SELECT c.relname, c.relkind FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = :schema AND c.relkind IN ('r', 'p')
            AND c.relowner <> (SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = :role_literal)
    LOOP
        EXECUTE format('ALTER TABLE %I.%I OWNER TO %I', :schema, object.relname, :role_literal);
    END LOOP;
END $body$;
ALTER FUNCTION outbox.era() OWNER TO :role;
ALTER FUNCTION outbox.publish(text, bytea, json, text, text, timestamptz) OWNER TO :role;

-- part: publisher
-- INSERT on columns, never on the table: whoever may set xid, era or
-- created_at can hide messages from every reader.
GRANT USAGE ON SCHEMA outbox TO :role;
GRANT SELECT ON outbox.meta TO :role;
GRANT INSERT (topic, key, uuid, metadata, payload) ON outbox.messages TO :role;
GRANT INSERT (due_at, topic, key, uuid, metadata, payload) ON outbox.deferred TO :role;
GRANT EXECUTE ON FUNCTION outbox.era(), outbox.publish(text, bytea, json, text, text, timestamptz) TO :role;

-- part: consumer
GRANT USAGE ON SCHEMA outbox TO :role;
GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO :role;
GRANT SELECT ON outbox.messages_id_seq TO :role;
GRANT INSERT, UPDATE, DELETE ON outbox.cursors, outbox.processes, outbox.boot, outbox.inbox TO :role;
GRANT INSERT, UPDATE, DELETE ON outbox.deferred, outbox.dead_letters TO :role;
GRANT INSERT (topic, key, uuid, metadata, payload, target_group, attempt) ON outbox.messages TO :role;
GRANT EXECUTE ON FUNCTION outbox.era() TO :role;

-- part: upkeep
GRANT USAGE, CREATE ON SCHEMA outbox TO :role;
GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO :role;
GRANT SELECT ON outbox.messages_id_seq TO :role;
GRANT INSERT, UPDATE, DELETE ON outbox.meta, outbox.deferred, outbox.inbox, outbox.processes TO :role;
GRANT DELETE, TRUNCATE ON outbox.messages, outbox.messages_default TO :role;
GRANT INSERT (topic, key, uuid, metadata, payload, target_group, attempt) ON outbox.messages TO :role;
GRANT EXECUTE ON FUNCTION outbox.era() TO :role;
