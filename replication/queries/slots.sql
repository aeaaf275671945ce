-- Logical slots, all of them or the one named $1. Columns that not every version
-- has are looked up in the row's JSON: conflicting came with 16, failover and
-- invalidation_reason with 17.
SELECT s.slot_name::text,
       coalesce(s.plugin::text, ''),
       coalesce(s.database::text, ''),
       s.temporary,
       coalesce(s.active_pid, 0),
       coalesce(s.restart_lsn, '0/0')::text,
       coalesce(s.confirmed_flush_lsn, '0/0')::text,
       coalesce(s.wal_status, ''),
       coalesce(pg_catalog.pg_wal_lsn_diff(w.lsn, s.restart_lsn), 0)::int8,
       coalesce(s.safe_wal_size, -1),
       coalesce((pg_catalog.to_jsonb(s) ->> 'failover')::bool, false),
       coalesce(pg_catalog.to_jsonb(s) ->> 'invalidation_reason', '')
FROM pg_catalog.pg_replication_slots s,
     (SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                  ELSE pg_catalog.pg_current_wal_lsn() END) AS w (lsn)
WHERE s.slot_type = 'logical' AND ($1::text IS NULL OR s.slot_name = $1::text)
ORDER BY s.slot_name
