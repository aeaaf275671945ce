-- What moving and removing groups needs.

-- What was done to groups, at whose hand, and where they were before.
CREATE TABLE outbox.group_log (
    id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    action         text        NOT NULL CHECK (action IN ('moved', 'dropped')),
    actor          text        NOT NULL DEFAULT current_user,
    reason         text        NOT NULL DEFAULT '',
    consumer_group text        COLLATE "C" NOT NULL,
    topic          text        COLLATE "C" NOT NULL,
    detail         jsonb       NOT NULL DEFAULT '{}'
);

-- A cursor that was removed may be made again, and taken by the process that had
-- it before. What that one has still under way must not fit the new one: epochs
-- begin at any number.
ALTER TABLE outbox.cursors ALTER COLUMN epoch SET DEFAULT floor(pg_catalog.random() * 1000000000000)::bigint;
