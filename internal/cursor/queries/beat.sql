-- Says that the process lives. The row may be missing: on the first beat, or
-- because somebody took the process for dead and swept it.
--
-- $1 holder, $2 host, $3 pid
INSERT INTO outbox.processes AS p (holder, beat, host, pid) VALUES ($1::text, 1, $2::text, $3::integer)
ON CONFLICT (holder) DO UPDATE SET beat = p.beat + 1, beat_at = clock_timestamp()
