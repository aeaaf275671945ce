-- The first row that the outbox cannot store.
SELECT r.n, r.uuid, r.problem
FROM (
    SELECT r.transaction_id, r.n, r.uuid, CASE
        WHEN coalesce(r.topic, '') = '' THEN 'is no envelope of Watermill''s forwarder: it has no destination_topic'
        WHEN octet_length(r.topic) > 1024 THEN 'has a topic of more than 1024 bytes'
        WHEN octet_length(r.uuid) > 1024 THEN 'has a uuid of more than 1024 bytes'
        WHEN octet_length(r.key) > 1024 THEN 'has an ordering key of more than 1024 bytes'
        WHEN octet_length(r.payload) > $7::bigint THEN 'has a payload of more than ' || $7::bigint || ' bytes'
        WHEN json_typeof(r.metadata) <> 'object' THEN 'has metadata that are no JSON object: ' || json_typeof(r.metadata)
        WHEN octet_length(r.metadata::text) > 1048576 THEN 'has metadata of more than 1048576 bytes'
        WHEN EXISTS (SELECT FROM json_each(r.metadata) AS v WHERE json_typeof(v.value) <> 'string')
            THEN 'has metadata with a value that is no string'
        WHEN r.due !~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:\d\d)$'
            THEN 'is delayed until a time that is not in RFC 3339: ' || left(r.due, 100)
    END AS problem
    FROM rows r
) AS r
WHERE r.problem IS NOT NULL
ORDER BY r.transaction_id, r.n
LIMIT 1
