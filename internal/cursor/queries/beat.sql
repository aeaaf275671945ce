-- Says that the process lives, and returns what it holds, in which life of the
-- server, of what of it another number of shards was asked for, and which topics
-- it is over. The row may be missing: on the first beat, or because somebody took
-- the process for dead and swept it.
--
-- $1 holder, $2 host, $3 pid
WITH beat AS (
    INSERT INTO outbox.processes AS p (holder, beat, host, pid) VALUES ($1::text, 1, $2::text, $3::integer)
    ON CONFLICT (holder) DO UPDATE SET beat = p.beat + 1, beat_at = clock_timestamp()
    RETURNING p.beat
)
SELECT outbox.era(), (SELECT b.life::text FROM outbox.boot b), c.consumer_group, c.topic, c.shard, c.epoch, c.reshard IS NOT NULL, c.patterns
FROM beat LEFT JOIN outbox.cursors c ON c.holder = $1::text
