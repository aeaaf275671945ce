-- Removes dead processes from the members. One that only slept joins again when
-- it wakes.
--
-- $1 dead holders, $2 their beats
DELETE FROM outbox.members m
USING unnest($1::text[], $2::bigint[]) AS d (holder, beat)
JOIN outbox.processes p ON p.holder = d.holder AND p.beat = d.beat
WHERE m.holder = d.holder
