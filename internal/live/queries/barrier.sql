-- Which transactions other sessions can see, and then how far the log goes: a
-- transaction that the snapshot sees has its commit before insert. With it, what
-- must not change under a stream: the life and the timeline of the server, and
-- the identity of the publication and of its tables, since a stream whose
-- publication was altered leaves out rows in silence. xmax shows an alteration
-- that others cannot see yet, although rows behind it are decoded already; and
-- what a publication consists of depends on it, in every version's catalogs.
--
-- $1 publication
SELECT outbox.era(), (SELECT b.life::text FROM outbox.boot b), pg_current_snapshot()::text,
       pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text,
       left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
       (SELECT concat_ws(':', p.oid, p.xmin, p.xmax) || coalesce((
               SELECT string_agg(' ' || concat_ws(':', d.classid, d.objid, d.xmin, d.xmax), '' ORDER BY d.classid, d.objid)
               FROM pg_catalog.pg_depend d
               WHERE d.refclassid = 'pg_catalog.pg_publication'::regclass AND d.refobjid = p.oid), '')
           FROM pg_catalog.pg_publication p WHERE p.pubname = $1::text)
