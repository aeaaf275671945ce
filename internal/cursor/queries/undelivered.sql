-- The rows that the position k has not handed out yet: those are its whose mine is
-- true, and the others were only looked at. Each branch looks at so many (:rows)
-- at most. A part of other statements.
--
-- What a snapshot does not see has an xid of its xip, or at or above its xmax; what
-- this statement sees is below the xmax of its own. That leaves the rows of an open
-- window, and of other eras.
SELECT u.branch, u.era, u.id, u.created_at,
       (k.shards = 1 OR outbox.shard(u.key, u.id, k.shards) = k.shard - k.base)
       AND (u.target_group IS NULL OR u.target_group = k.consumer_group)
       AND CASE WHEN u.era = k.e THEN u.id <> ALL (k.ahead)
           ELSE NOT coalesce(
               pg_visible_in_snapshot(u.xid, (k.known -> u.era::text ->> 'p')::pg_snapshot)
               OR coalesce(pg_visible_in_snapshot(u.xid, nullif(k.known -> u.era::text ->> 'c', '')::pg_snapshot), false)
                   AND u.id <= coalesce((k.known -> u.era::text ->> 'at')::bigint, 0)
               OR EXISTS (
                   SELECT FROM jsonb_array_elements(coalesce(k.known -> u.era::text -> 'ahead', '[]')) AS a (row)
                   WHERE (a.row ->> 0)::bigint = u.id), false)
           END
       -- Of one that ends, what comes behind the end is its successors'.
       AND (k.until IS NULL OR CASE WHEN u.era = k.until_era THEN pg_visible_in_snapshot(u.xid, k.until) ELSE u.era <> k.e END)
       AS mine
FROM (
    (
        SELECT 1 AS branch, r.* FROM pg_snapshot_xip(coalesce(k.c, k.p)) AS x (xid)
        CROSS JOIN LATERAL (
            SELECT m.era, m.id, m.xid, m.key, m.target_group, m.created_at FROM :messages m
            WHERE :chosen AND m.xid >= x.xid AND m.xid <= x.xid AND m.era = k.e
            ORDER BY m.xid, m.id LIMIT :rows
        ) AS r
        LIMIT :rows
    )
    UNION ALL
    (
        SELECT 2, m.era, m.id, m.xid, m.key, m.target_group, m.created_at FROM :messages m
        WHERE :chosen AND m.xid >= pg_snapshot_xmax(coalesce(k.c, k.p)) AND m.xid < pg_snapshot_xmax(k.now) AND m.era = k.e
        ORDER BY m.xid, m.id LIMIT :rows
    )
    UNION ALL
    (
        SELECT 3, m.era, m.id, m.xid, m.key, m.target_group, m.created_at FROM :messages m
        WHERE :chosen AND k.c IS NOT NULL AND m.era = k.e AND m.id > k.upto AND m.id <= k.top
            AND NOT pg_visible_in_snapshot(m.xid, k.p) AND pg_visible_in_snapshot(m.xid, k.c)
        ORDER BY m.era, m.id LIMIT :rows
    )
    UNION ALL
    (
        SELECT 4, m.era, m.id, m.xid, m.key, m.target_group, m.created_at FROM :messages m
        WHERE :chosen AND k.open AND m.era < k.e AND (m.era, m.id) > (k.open_era, k.open_id)
        ORDER BY m.era, m.id LIMIT :rows
    )
    UNION ALL
    (
        -- One comparison, see past.sql of package window.
        SELECT 5, m.era, m.id, m.xid, m.key, m.target_group, m.created_at FROM :messages m
        WHERE :chosen AND k.open
            AND (m.era, m.id) > (greatest(k.open_era, k.e), CASE WHEN k.open_era > k.e THEN k.open_id ELSE 9223372036854775807 END)
        ORDER BY m.era, m.id LIMIT :rows
    )
) AS u
