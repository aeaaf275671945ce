-- How much of the log the slot keeps from being removed, and the oldest running
-- transaction.
--
-- $1 slot
SELECT coalesce(pg_wal_lsn_diff(pg_current_wal_insert_lsn(), s.restart_lsn), 0)::bigint,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint
FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = $1::text
