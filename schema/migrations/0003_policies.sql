-- What delivery policies need: shards, counted attempts, deferred messages and
-- dead letters that can be looked after.

-- Which shard a message belongs to: by the first four bytes of the MD5 of its
-- key, or by its id where it has none. internal/shard says the same in Go; the
-- two must never differ, nor change while there are cursors of several shards.
CREATE FUNCTION outbox.shard(key text, id bigint, shards integer) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $body$
        SELECT CASE WHEN key IS NULL THEN id % shards
            ELSE ('x' || pg_catalog.substr(pg_catalog.md5(key), 1, 8))::bit(32)::bigint % shards END::integer
    $body$;

-- A cursor is the shard number shard - base of shards. When their number is
-- changed, new ones take the place of the old: numbered on from a higher base,
-- they begin at the common snapshot at which the old ones end (until, in the era
-- until_era), and wait until those are through and gone. reshard is the number
-- asked for, from the request until the change.
--
-- reach is how many rows may have been handed out beyond the stored position:
-- after an unclean end these, and the holes, may be what ended the process.
ALTER TABLE outbox.cursors
    ADD COLUMN shards    integer NOT NULL DEFAULT 1 CHECK (shards > 0),
    ADD COLUMN base      integer NOT NULL DEFAULT 0 CHECK (base >= 0),
    ADD COLUMN until     pg_snapshot,
    ADD COLUMN until_top bigint  NOT NULL DEFAULT 0,
    ADD COLUMN until_era bigint  NOT NULL DEFAULT 0,
    ADD COLUMN reshard   integer CHECK (reshard > 0),
    ADD COLUMN reach     integer NOT NULL DEFAULT 0 CHECK (reach >= 0),
    ADD CHECK (shard >= base AND shard < base + shards);

-- Which living processes want a topic for a group, and with how many
-- subscriptions: shards are spread over them.
CREATE TABLE outbox.members (
    holder         text    COLLATE "C" NOT NULL,
    consumer_group text    COLLATE "C" NOT NULL,
    topic          text    COLLATE "C" NOT NULL,
    subscriptions  integer NOT NULL DEFAULT 1 CHECK (subscriptions > 0),
    PRIMARY KEY (consumer_group, topic, holder)
) WITH (fillfactor = 50);

-- A retry names the message it is of. One that cannot be promoted is tried again
-- later, and says why.
ALTER TABLE outbox.deferred
    ADD COLUMN origin_era bigint,
    ADD COLUMN origin_id  bigint,
    ADD COLUMN failures   integer NOT NULL DEFAULT 0,
    ADD COLUMN error      text;

-- A message dies once for each group.
CREATE UNIQUE INDEX dead_letters_origin ON outbox.dead_letters (consumer_group, origin_era, origin_id);

-- What became of dead letters, and at whose hand. It keeps no payload.
CREATE TABLE outbox.dead_letter_log (
    id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    action         text        NOT NULL CHECK (action IN ('died', 'requeued', 'discarded')),
    actor          text        NOT NULL DEFAULT current_user,
    reason         text        NOT NULL DEFAULT '',
    dead_letter_id bigint      NOT NULL,
    consumer_group text        COLLATE "C" NOT NULL,
    topic          text        COLLATE "C" NOT NULL,
    key            text        COLLATE "C",
    uuid           text        COLLATE "C" NOT NULL,
    origin_era     bigint      NOT NULL,
    origin_id      bigint      NOT NULL,
    attempts       integer     NOT NULL
);
CREATE INDEX dead_letter_log_letter ON outbox.dead_letter_log (dead_letter_id);
CREATE INDEX dead_letter_log_at ON outbox.dead_letter_log (at);

-- As before, and with deliver_at the message waits in deferred. It runs in anybody's
-- session, so it says itself where the functions and operators come from.
CREATE OR REPLACE FUNCTION outbox.publish(
    topic      text,
    payload    bytea,
    metadata   json        DEFAULT '{}',
    key        text        DEFAULT NULL,
    uuid       text        DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL
) RETURNS text
    LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
    AS $body$
BEGIN
    IF publish.topic IS NULL OR publish.topic = '' OR octet_length(publish.topic) > 1024 THEN
        RAISE EXCEPTION 'outbox: topic must have 1 to 1024 bytes, has %', coalesce(octet_length(publish.topic), 0)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(publish.key) > 1024 THEN
        RAISE EXCEPTION 'outbox: ordering key must have at most 1024 bytes, has %', octet_length(publish.key)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(publish.uuid) > 1024 THEN
        RAISE EXCEPTION 'outbox: uuid must have at most 1024 bytes, has %', octet_length(publish.uuid)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF publish.metadata IS NULL THEN
        publish.metadata := '{}';
    ELSIF json_typeof(publish.metadata) <> 'object' THEN
        RAISE EXCEPTION 'outbox: metadata must be a JSON object of strings, is %', json_typeof(publish.metadata)
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF EXISTS (SELECT FROM json_each(publish.metadata) AS m WHERE json_typeof(m.value) <> 'string') THEN
        RAISE EXCEPTION 'outbox: metadata must be a JSON object of strings, but % is not a string',
            (SELECT m.key FROM json_each(publish.metadata) AS m WHERE json_typeof(m.value) <> 'string' LIMIT 1)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    publish.uuid := coalesce(publish.uuid, gen_random_uuid()::text);
    IF publish.deliver_at > clock_timestamp() THEN
        INSERT INTO outbox.deferred (due_at, topic, key, uuid, metadata, payload)
            VALUES (publish.deliver_at, publish.topic, nullif(publish.key, ''), publish.uuid, publish.metadata, publish.payload);
    ELSE
        INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
            VALUES (publish.topic, nullif(publish.key, ''), publish.uuid, publish.metadata, publish.payload);
    END IF;
    RETURN publish.uuid;
END $body$;
