-- What keeps a subscriber from reading the WAL although polling works, as in
-- check.sql. It runs on PostgreSQL 14, too, where publications have no row
-- filters, no columns and no schemas: hence the ways around their catalogs.
--
-- $1 schema, $2 publication, $3 the statement that creates the publication
WITH relation AS (
    SELECT c.oid, c.relname FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1::text
), publication AS (
    SELECT p.*, r.oid IS NOT NULL AS listed,
           to_jsonb(r) ->> 'prqual' IS NOT NULL AS has_filter, to_jsonb(r) ->> 'prattrs' IS NOT NULL AS has_columns
    FROM relation t
    CROSS JOIN pg_catalog.pg_publication p
    LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = t.oid
    WHERE t.relname = 'messages' AND p.pubname = $2::text
), judged AS (
    -- The view is asked last, since it lists every table there is.
    SELECT p.*, CASE WHEN p.puballtables OR p.listed THEN true ELSE EXISTS (
        SELECT FROM pg_catalog.pg_publication_tables v
        WHERE v.pubname = p.pubname AND v.schemaname = $1::text AND v.tablename = 'messages') END AS covers
    FROM publication p
), used (setting, taken, remedy) AS (
    SELECT 'max_replication_slots', (SELECT count(*) FROM pg_catalog.pg_replication_slots),
           'or drop a slot of pg_replication_slots that nobody reads any more'
    UNION ALL
    SELECT 'max_wal_senders', (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders()),
           'or end one of pg_stat_replication that nobody needs'
)
SELECT 'live' AS severity, 'setting wal_level' AS object, current_setting('wal_level') AS found, 'logical' AS wanted,
       'ALTER SYSTEM SET wal_level = logical: and restart the server; a managed one has a setting instead: rds.logical_replication (Amazon), cloudsql.logical_decoding (Google), wal_level among the server parameters (Azure)' AS remedy
WHERE current_setting('wal_level') <> 'logical'

UNION ALL
SELECT 'live', 'setting ' || u.setting, format('%s, with %s in use', current_setting(u.setting), u.taken), 'one to spare',
       format('ALTER SYSTEM SET %I = %s: and restart the server; %s', u.setting, u.taken + 10, u.remedy)
FROM used u WHERE u.taken >= current_setting(u.setting)::bigint

UNION ALL
-- Who logs in is asked for it, whatever role is set later. A consumer is who
-- keeps positions.
SELECT 'live', 'role ' || format('%I', r.rolname), 'no REPLICATION', 'REPLICATION',
       CASE WHEN amazon.oid IS NULL THEN format('ALTER ROLE %I REPLICATION: as a superuser', r.rolname)
           ELSE format('GRANT rds_replication TO %I: as a member of rds_superuser', r.rolname)
       END
FROM pg_catalog.pg_roles r
LEFT JOIN pg_catalog.pg_roles amazon ON amazon.rolname = 'rds_replication'
WHERE r.rolname = session_user AND NOT r.rolsuper AND NOT r.rolreplication
    AND (amazon.oid IS NULL OR NOT pg_catalog.pg_has_role(r.oid, amazon.oid, 'MEMBER'))
    AND EXISTS (SELECT FROM relation t WHERE t.relname = 'cursors' AND pg_catalog.has_table_privilege(t.oid, 'UPDATE'))

UNION ALL
SELECT 'live', 'publication ' || format('%I', $2::text), 'missing', 'present',
       $3::text || ': as a superuser, or as the owner of the tables with CREATE on the database'
FROM relation t
WHERE t.relname = 'messages' AND NOT EXISTS (SELECT FROM pg_catalog.pg_publication p WHERE p.pubname = $2::text)

UNION ALL
-- More than what is needed does no harm, so what there is stays: the publication
-- may have other readers.
SELECT 'live', 'publication ' || format('%I', $2::text),
       concat_ws(', ',
           CASE WHEN j.puballtables THEN 'all tables' END,
           CASE WHEN NOT j.covers THEN 'without table messages' END,
           CASE WHEN j.has_filter THEN 'with a row filter on table messages' END,
           CASE WHEN j.has_columns THEN 'with a column list of table messages' END,
           CASE WHEN NOT j.pubinsert THEN 'without inserts' END,
           CASE WHEN NOT j.pubviaroot THEN 'not via the partition root' END),
       'every insert into table messages, via the partition root',
       concat_ws('; ',
           CASE WHEN j.has_filter OR j.has_columns THEN format('ALTER PUBLICATION %I DROP TABLE %I.messages', $2::text, $1::text) END,
           CASE WHEN j.has_filter OR j.has_columns OR NOT j.covers THEN format('ALTER PUBLICATION %I ADD TABLE %I.messages', $2::text, $1::text) END,
           CASE WHEN NOT j.pubinsert OR NOT j.pubviaroot THEN
               format('ALTER PUBLICATION %I SET (publish = %L, publish_via_partition_root = true)', $2::text,
                   concat_ws(', ', 'insert', CASE WHEN j.pubupdate THEN 'update' END, CASE WHEN j.pubdelete THEN 'delete' END,
                       CASE WHEN j.pubtruncate THEN 'truncate' END))
           END) || ': if others read it, see first whether that is all right for them'
FROM judged j
WHERE NOT j.covers OR j.has_filter OR j.has_columns OR NOT j.pubinsert OR NOT j.pubviaroot
ORDER BY 2, 3
