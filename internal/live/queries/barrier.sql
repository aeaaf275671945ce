-- Which transactions other sessions can see, and then how far the log goes: a
-- transaction that the snapshot sees has its commit before insert. With it, what
-- must not change under a stream: the life and the timeline of the server, and
-- the identity of the publication and of its tables, since a stream whose
-- publication was altered leaves out rows in silence.
--
-- $1 publication
SELECT outbox.era(), (SELECT b.life::text FROM outbox.boot b), pg_current_snapshot()::text,
       pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text,
       left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
       (SELECT p.oid::text || ':' || p.xmin::text || coalesce((
               SELECT string_agg(' ' || r.oid::text || ':' || r.xmin::text, '' ORDER BY r.oid)
               FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = p.oid), '')
           FROM pg_catalog.pg_publication p WHERE p.pubname = $1::text)
