-- One publication and, in the same snapshot, the tables it comes down to: those
-- named by it, of its schemas, or all. A row without a table is a publication
-- without any. How names are written does not depend on search_path here.
SELECT p.oid, p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot,
       t.schemaname::text, t.tablename::text
FROM pg_catalog.pg_publication p
LEFT JOIN pg_catalog.pg_publication_tables t ON t.pubname = p.pubname
WHERE p.pubname = $1::text
ORDER BY t.schemaname, t.tablename
