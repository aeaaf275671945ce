-- The ranges of the log, in order, with their seals: what RangesOf reads.
SELECT p.lower, p.upper, p.seal::text, coalesce(p.seal_era, 0)
FROM outbox.partitions p
WHERE p.lower IS NOT NULL
ORDER BY p.lower
