-- The partitions of the log but the DEFAULT one, in order: where each ends, what its
-- seal is if it has one, and whether upkeep knows it at all. And :spare, as in the
-- statements that leave partitions out.
SELECT outbox.era(), (SELECT b.life::text FROM outbox.boot b), p.name IS NOT NULL, p.upper, CASE WHEN p.state IN ('sealed', 'freed') THEN p.seal::text END, p.seal_era,
       :spare
FROM pg_catalog.pg_namespace n
JOIN pg_catalog.pg_class log ON log.relnamespace = n.oid AND log.relname = 'messages'
JOIN pg_catalog.pg_inherits i ON i.inhparent = log.oid
JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND NOT (c.relnamespace = n.oid AND c.relname = 'messages_default')
LEFT JOIN outbox.partitions p ON p.name = c.relname AND c.relnamespace = n.oid AND p.upper IS NOT NULL
WHERE n.nspname = :schema
ORDER BY p.upper NULLS FIRST
