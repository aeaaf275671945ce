-- The tables, written for the schema named outbox: the loader puts the
-- configured name in place of that prefix, and fills in the values that begin
-- with a colon.

-- The cluster's system identifier: rows written on one cluster can be told
-- from rows restored into another, where transaction ids start again. Declared
-- IMMUTABLE, although a restored dump changes its answer, so that the planner
-- folds it into a constant; a plan never outlives the server it was made on.
CREATE FUNCTION outbox.era() RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $body$ SELECT system_identifier FROM pg_catalog.pg_control_system() $body$;

-- What the installation is and how it is to be kept. Keys: version,
-- partition_interval and look_ahead (seconds); later the seals of partitions.
CREATE TABLE outbox.meta (
    key   text PRIMARY KEY,
    value jsonb NOT NULL
);

-- The log. A row is written once, by the publishing transaction, and never
-- updated; whole partitions go when everybody has them.
--
-- id orders messages within a reading window, so its sequence must hand out
-- numbers in the order of the calls: CACHE 1. xid is the publishing
-- transaction: which snapshots see the row is computed from it. created_at
-- only chooses the partition, no promise rests on it. Names are compared byte by
-- byte (COLLATE "C"), which is quicker, and an index on them stays good when the
-- operating system changes how it sorts.
CREATE TABLE outbox.messages (
    id           bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1),
    xid          xid8        NOT NULL DEFAULT pg_catalog.pg_current_xact_id(),
    era          bigint      NOT NULL DEFAULT outbox.era(),
    topic        text        COLLATE "C" NOT NULL,
    key          text        COLLATE "C",
    uuid         text        COLLATE "C" NOT NULL,
    metadata     json        NOT NULL DEFAULT '{}',
    payload      bytea,
    created_at   timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    target_group text        COLLATE "C",
    attempt      integer     NOT NULL DEFAULT 0
) PARTITION BY RANGE (created_at);

-- An insert never fails for lack of a partition.
CREATE TABLE outbox.messages_default PARTITION OF outbox.messages DEFAULT;

-- The main rows of a window, by keyset; and the rows of other eras, found
-- without reading those of this one. There is no index on id alone: the planner
-- preferred it to this one for topics that its statistics call frequent, and
-- walked the rows of all topics for one that is not.
CREATE INDEX messages_topic_era_id ON outbox.messages (topic, era, id);
-- The late rows of a window, transaction by transaction.
CREATE INDEX messages_topic_xid_id ON outbox.messages (topic, xid, id);

-- One row per (group, topic, shard): how far the group is. See the package
-- documentation of internal/window for what the columns of the position mean.
CREATE TABLE outbox.cursors (
    consumer_group text        COLLATE "C" NOT NULL,
    topic          text        COLLATE "C" NOT NULL,
    shard          integer     NOT NULL DEFAULT 0 CHECK (shard >= 0),
    era            bigint      NOT NULL,
    p              pg_snapshot NOT NULL,
    floor          bigint      NOT NULL DEFAULT 0,
    c              pg_snapshot,
    top            bigint      NOT NULL DEFAULT 0,
    step           text        NOT NULL DEFAULT 'idle' CHECK (step IN ('past', 'idle', 'late', 'main')),
    at             bigint      NOT NULL DEFAULT 0,
    at_era         bigint      NOT NULL DEFAULT 0,
    holes          jsonb       NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(holes) = 'array'),
    past           jsonb       NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(past) = 'object'),
    holder         text        COLLATE "C",
    epoch          bigint      NOT NULL DEFAULT 0,
    created_at     timestamptz NOT NULL DEFAULT now(),
    updated_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, topic, shard),
    CHECK ((step IN ('late', 'main')) = (c IS NOT NULL))
) WITH (fillfactor = 50);

-- One row per consuming process. A holder is alive while its beat changes.
CREATE TABLE outbox.processes (
    holder     text        COLLATE "C" PRIMARY KEY,
    beat       bigint      NOT NULL DEFAULT 0,
    host       text        NOT NULL DEFAULT '',
    pid        integer     NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    beat_at    timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

-- What is due later: scheduled messages, and retries of one group.
CREATE TABLE outbox.deferred (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    due_at       timestamptz NOT NULL,
    topic        text        COLLATE "C" NOT NULL,
    key          text        COLLATE "C",
    uuid         text        COLLATE "C" NOT NULL,
    metadata     json        NOT NULL DEFAULT '{}',
    payload      bytea,
    created_at   timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    target_group text        COLLATE "C",
    attempt      integer     NOT NULL DEFAULT 0
);
CREATE INDEX deferred_due ON outbox.deferred (due_at, id);

-- What exhausted its attempts, with its origin.
CREATE TABLE outbox.dead_letters (
    id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer_group text        COLLATE "C" NOT NULL,
    topic          text        COLLATE "C" NOT NULL,
    key            text        COLLATE "C",
    uuid           text        COLLATE "C" NOT NULL,
    metadata       json        NOT NULL DEFAULT '{}',
    payload        bytea,
    origin_era     bigint      NOT NULL,
    origin_id      bigint      NOT NULL,
    created_at     timestamptz NOT NULL,
    attempts       integer     NOT NULL,
    error          text        NOT NULL,
    died_at        timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
CREATE INDEX dead_letters_group ON outbox.dead_letters (consumer_group, topic, id);

-- What an effectively-once handler of a group has done already.
CREATE TABLE outbox.inbox (
    consumer_group text        COLLATE "C" NOT NULL,
    uuid           text        COLLATE "C" NOT NULL,
    handled_at     timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (consumer_group, uuid)
);
CREATE INDEX inbox_handled ON outbox.inbox (handled_at);

-- One row per life of the server. UNLOGGED on purpose: the row vanishes in
-- crash recovery and in promotion, after which transaction ids and message ids
-- may be issued again, and survives a clean restart, after which they are not.
CREATE UNLOGGED TABLE outbox.boot (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    life     uuid    NOT NULL DEFAULT pg_catalog.gen_random_uuid()
);
INSERT INTO outbox.boot DEFAULT VALUES;

-- The way in for triggers and for producers in other languages. Returns the
-- message's UUID. Needs nothing but INSERT on the granted columns.
CREATE FUNCTION outbox.publish(
    topic      text,
    payload    bytea,
    metadata   json        DEFAULT '{}',
    key        text        DEFAULT NULL,
    uuid       text        DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL
) RETURNS text
    LANGUAGE plpgsql VOLATILE
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
    IF publish.deliver_at > clock_timestamp() THEN
        RAISE EXCEPTION 'outbox: scheduled messages are not supported by schema version 1'
            USING ERRCODE = 'feature_not_supported', HINT = 'Publish without deliver_at.';
    END IF;
    publish.uuid := coalesce(publish.uuid, gen_random_uuid()::text);
    INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
        VALUES (publish.topic, nullif(publish.key, ''), publish.uuid, publish.metadata, publish.payload);
    RETURN publish.uuid;
END $body$;

-- The first partitions: the running interval and those that begin within the
-- look-ahead. Nobody reads yet, so they can be created in place; later ones
-- are attached ahead of time.
INSERT INTO outbox.meta (key, value) VALUES
    ('partition_interval', to_jsonb(:partition_interval::bigint)),
    ('look_ahead', to_jsonb(:look_ahead::bigint));

DO $body$
DECLARE
    width bigint := (SELECT m.value::bigint FROM outbox.meta m WHERE m.key = 'partition_interval');
    ahead bigint := (SELECT m.value::bigint FROM outbox.meta m WHERE m.key = 'look_ahead');
    moment bigint := floor(extract(epoch FROM now()));
    lower bigint := moment / width * width;
    until bigint := moment + ahead;
BEGIN
    WHILE lower <= until LOOP
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF %I.messages FOR VALUES FROM (%L) TO (%L)',
            :schema, 'messages_' || to_char(to_timestamp(lower) AT TIME ZONE 'UTC', 'YYYYMMDD"t"HH24MISS'),
            :schema, to_timestamp(lower), to_timestamp(lower + width));
        lower := lower + width;
    END LOOP;
END $body$;
