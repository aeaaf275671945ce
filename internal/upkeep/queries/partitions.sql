-- What is known of each partition that upkeep looks after, by range, the DEFAULT
-- one last, and whether the time for its seal has come.
--
-- $1 seconds by which its range must have passed
SELECT p.name, p.lower, p.upper, p.state, p.voided, cardinality(p.waits_for), p.seal::text, p.sealed_at, p.delivered_at, p.archived_at,
       p.freed_at, p.held_by::text, p.held_since, p.error,
       coalesce(p.upper + make_interval(secs => $1::float8) <= clock_timestamp(), true)
FROM outbox.partitions p
ORDER BY p.lower, p.name
