-- What upkeep needs: what is known of each partition, and functions that do, with
-- the owner's rights, what only the owner may do. Each checks by itself what makes
-- its step safe, whoever calls it: nothing that is undelivered goes. They are for
-- READ COMMITTED, where each statement sees what committed before it began, and
-- for short transactions of their own, one step each. None waits for a lock on
-- messages, or on a partition, for longer than 50 ms: whoever comes after would
-- wait behind it. They call each other with the very types that are declared, so that
-- a function of the same name, by somebody who may create one in the schema, is not
-- called in place of one of them, with the owner's rights.

-- The partitions that upkeep looks after. State:
--
--   open     rows may come. Of the DEFAULT partition: nothing is marked
--   waiting  the range has passed, by a delay; the transactions that were writing
--            to the log at that moment (waits_for) may yet insert
--   sealed   seal is a snapshot that sees all there is. Of the DEFAULT partition:
--            the rows that seal sees are to go next
--   freed    emptied; what is left is a shell, which is dropped when that makes
--            nobody wait
--   detached somebody else detached it, or dropped it, while there may have been rows
--            in it, and readers went on without them: back or not, it is left alone
--
-- A position whose P covers the seal has all of the partition. delivered_at is
-- when every group had, held_by and held_since say who has not. error is why the
-- last step failed.
CREATE TABLE outbox.partitions (
    name         text        COLLATE "C" PRIMARY KEY,
    lower        timestamptz,
    upper        timestamptz,
    state        text        NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'waiting', 'sealed', 'freed', 'detached')),
    waits_for    text[]      NOT NULL DEFAULT '{}',
    seal         pg_snapshot,
    seal_era     bigint,
    sealed_at    timestamptz,
    delivered_at timestamptz,
    archived_at  timestamptz,
    freed_at     timestamptz,
    voided       integer     NOT NULL DEFAULT 0,
    held_by      jsonb,
    held_since   timestamptz,
    error        text,
    error_at     timestamptz,
    CHECK ((lower IS NULL) = (upper IS NULL)),
    CHECK ((state IN ('sealed', 'freed')) = (seal IS NOT NULL)),
    CHECK ((seal IS NULL) = (seal_era IS NULL))
);

-- One row: who does the upkeep, until when it may take before others go on, when
-- it was last through, and the guard on the DEFAULT partition, if there is one.
--
-- Readers remember seals. What they remember is good while voids is what it was:
-- it changes in the transaction that opens again what was sealed, so whoever sees a
-- message that came after that sees this, too. sealed_to is before when anything was
-- ever sealed.
CREATE TABLE outbox.upkeep (
    only_row    boolean     PRIMARY KEY DEFAULT true CHECK (only_row),
    holder      text        COLLATE "C",
    until       timestamptz,
    ran_at      timestamptz,
    guard_lower timestamptz,
    guard_upper timestamptz,
    guard_until timestamptz,
    voids       bigint      NOT NULL DEFAULT 0,
    sealed_to   timestamptz
);
INSERT INTO outbox.upkeep DEFAULT VALUES;

-- Whether everybody who has been handed out what p sees has been handed out what
-- the seal sees. Snapshot.Covers of internal/window says the same in Go.
CREATE FUNCTION outbox.upkeep_covers(p pg_snapshot, seal pg_snapshot) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $body$
        SELECT NOT EXISTS (SELECT FROM pg_catalog.pg_snapshot_xip(p) AS x WHERE pg_catalog.pg_visible_in_snapshot(x, seal))
            -- All in [xmax(p), xmax(seal)), which p does not see, must have been
            -- running for the seal.
            AND (SELECT count(*) FROM pg_catalog.pg_snapshot_xip(seal) AS x WHERE x >= pg_catalog.pg_snapshot_xmax(p))
                >= pg_catalog.pg_snapshot_xmax(seal)::text::numeric - pg_catalog.pg_snapshot_xmax(p)::text::numeric
    $body$;

-- Whether a moment has passed. Declared IMMUTABLE, which it is not, so that
-- where it stands in a constraint it is evaluated once for each statement, and
-- before the server looks at what the constraint proves: see upkeep_guard.
CREATE FUNCTION outbox.upkeep_passed(moment timestamptz) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $body$ SELECT pg_catalog.clock_timestamp() OPERATOR(pg_catalog.>=) moment $body$;

-- Begins a step: one at a time, and whoever comes second does not wait (55P03).
CREATE FUNCTION outbox.upkeep_enter() RETURNS void
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    AS $body$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'outbox: upkeep must run in a transaction that is READ COMMITTED, this one is %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'invalid_transaction_state';
    END IF;
    PERFORM FROM outbox.upkeep FOR UPDATE NOWAIT;
    IF NOT FOUND THEN
        INSERT INTO outbox.upkeep DEFAULT VALUES;
    END IF;
END $body$;

-- Takes or renews the lease on the upkeep, for so many seconds: 'mine', 'working'
-- while a step is being done, the caller's perhaps, 'busy' while somebody else has it,
-- 'rested' if less than rest seconds have passed since somebody was through. Only the clock of the database counts. One that was set back
-- makes neither time longer than it is at first.
CREATE FUNCTION outbox.upkeep_begin(holder text, lease double precision, rest double precision) RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $body$
DECLARE
    moment timestamptz := clock_timestamp();
    length interval := make_interval(secs => lease);
    kept record;
BEGIN
    SELECT u.* INTO kept FROM outbox.upkeep u FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        INSERT INTO outbox.upkeep DEFAULT VALUES ON CONFLICT DO NOTHING;
        RETURN 'working';
    END IF;
    IF kept.holder <> upkeep_begin.holder AND kept.until > moment AND kept.until <= moment + length THEN
        RETURN 'busy';
    END IF;
    IF kept.holder IS DISTINCT FROM upkeep_begin.holder AND kept.ran_at <= moment AND kept.ran_at > moment - make_interval(secs => rest) THEN
        RETURN 'rested';
    END IF;
    UPDATE outbox.upkeep SET holder = upkeep_begin.holder, until = moment + length;
    RETURN 'mine';
END $body$;

-- Gives the lease up; through says that all has been seen to.
CREATE FUNCTION outbox.upkeep_end(holder text, through boolean) RETURNS void
    LANGUAGE sql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $body$
        UPDATE outbox.upkeep u
        SET holder = NULL, until = NULL, ran_at = CASE WHEN upkeep_end.through THEN clock_timestamp() ELSE u.ran_at END
        WHERE u.holder = upkeep_end.holder
    $body$;

-- What is attached to the log: kind is 'default', 'ours' for what the migrations
-- and upkeep make (by its name), else 'other', which is read like the rest and
-- otherwise left alone. Of all, or of one: each step asks for its own, and to read the
-- bounds of hundreds each time would make a pass grow with the square of their number.
CREATE FUNCTION outbox.upkeep_attached(one text, OUT name text, OUT relation oid, OUT lower timestamptz, OUT upper timestamptz, OUT kind text)
    RETURNS SETOF record
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' SET DateStyle = 'ISO, YMD'
    AS $body$
        SELECT c.relname::text, c.oid, b.lower, b.upper,
            CASE WHEN pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT' AND n.nspname = :schema AND c.relkind = 'r' AND c.relname = 'messages_default' THEN 'default'
                WHEN n.nspname = :schema AND c.relkind = 'r' AND isfinite(b.lower) AND isfinite(b.upper)
                    AND c.relname = 'messages_' || to_char(b.lower AT TIME ZONE 'UTC', 'YYYYMMDD"t"HH24MISS') THEN 'ours'
                ELSE 'other' END
        FROM pg_class parent
        JOIN pg_namespace pn ON pn.oid = parent.relnamespace AND pn.nspname = :schema
        JOIN pg_inherits i ON i.inhparent = parent.oid
        JOIN pg_class c ON c.oid = i.inhrelid
        JOIN pg_namespace n ON n.oid = c.relnamespace
        CROSS JOIN LATERAL (
            SELECT (CASE WHEN t.expr ~ $re$^FOR VALUES FROM \(MINVALUE$re$ THEN '-infinity'
                        ELSE (regexp_match(t.expr, $re$FROM \('([^']*)'\) TO$re$))[1] END)::timestamptz AS lower,
                   (CASE WHEN t.expr ~ $re$TO \(MAXVALUE$re$ THEN 'infinity'
                        ELSE (regexp_match(t.expr, $re$TO \('([^']*)'\)$re$))[1] END)::timestamptz AS upper
            FROM (SELECT pg_get_expr(c.relpartbound, c.oid) AS expr) AS t
        ) AS b
        WHERE parent.relname = 'messages' AND c.relname = coalesce(one, c.relname)
    $body$;

-- Brings the table of partitions up to date with what is attached, and returns
-- what is not as it should be: an object, and what about it.
CREATE FUNCTION outbox.upkeep_sync(OUT object text, OUT problem text) RETURNS SETOF record
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $body$
DECLARE
    p record;
BEGIN
    PERFORM outbox.upkeep_enter();
    INSERT INTO outbox.partitions (name, lower, upper)
    SELECT a.name, a.lower, a.upper FROM outbox.upkeep_attached(NULL::text) a WHERE a.kind IN ('ours', 'default')
    ON CONFLICT (name) DO NOTHING;
    IF FOUND THEN
        UPDATE outbox.upkeep u SET voids = u.voids + 1 WHERE EXISTS (SELECT FROM outbox.partitions q WHERE q.state = 'open' AND q.lower < u.sealed_to);
    END IF;
    -- A name that has another range now is another table.
    UPDATE outbox.partitions q
    SET lower = a.lower, upper = a.upper, state = CASE WHEN q.state = 'detached' THEN q.state ELSE 'open' END, waits_for = '{}', seal = NULL, seal_era = NULL, sealed_at = NULL,
        delivered_at = NULL, archived_at = NULL, freed_at = NULL, held_by = NULL, held_since = NULL
    FROM outbox.upkeep_attached(NULL::text) a
    WHERE a.name = q.name AND a.kind = 'ours' AND (a.lower, a.upper) IS DISTINCT FROM (q.lower, q.upper);
    IF FOUND THEN
        UPDATE outbox.upkeep u SET voids = u.voids + 1;
    END IF;
    FOR p IN
        SELECT q.name, q.state, to_regclass(format('%I.%I', :schema, q.name)) IS NOT NULL AS there FROM outbox.partitions q
        WHERE NOT EXISTS (SELECT FROM outbox.upkeep_attached(NULL::text) a WHERE a.name = q.name AND a.kind IN ('ours', 'default'))
    LOOP
        object := p.name;
        IF NOT p.there AND p.state = 'freed' THEN
            DELETE FROM outbox.partitions q WHERE q.name = p.name;
            CONTINUE;
        END IF;
        -- That it has another name, or is in another schema, for a while looks like this,
        -- too: the row stays.
        CONTINUE WHEN NOT p.there AND p.state = 'detached';
        IF p.state NOT IN ('freed', 'detached') THEN
            UPDATE outbox.partitions q
            SET state = 'detached', waits_for = '{}', seal = NULL, seal_era = NULL, sealed_at = NULL, delivered_at = NULL, archived_at = NULL,
                held_by = NULL, held_since = NULL
            WHERE q.name = p.name;
            UPDATE outbox.upkeep u SET voids = u.voids + 1;
        END IF;
        IF NOT p.there THEN
            problem := 'was dropped by somebody else, and with it the messages it held';
        ELSE
            problem := 'was detached by somebody else: the messages in it are not read, and would not be if it were attached again, for readers go on; insert into messages again what is needed of it (topic, key, uuid, metadata, payload), and drop it';
        END IF;
        RETURN NEXT;
    END LOOP;
    FOR object IN
        SELECT q.name FROM outbox.partitions q JOIN outbox.upkeep_attached(NULL::text) a ON a.name = q.name AND a.kind IN ('ours', 'default')
        WHERE q.state = 'detached'
    LOOP
        problem := 'was detached by somebody else and attached again: the groups went past the messages in it meanwhile, so nothing of it is removed. Seek those that need them back to its time, and then set its state to open in the table partitions';
        RETURN NEXT;
    END LOOP;
    FOR object IN SELECT a.name FROM outbox.upkeep_attached(NULL::text) a WHERE a.kind = 'other' LOOP
        problem := 'is a partition that upkeep did not make: its messages are delivered, but it is never emptied or dropped, and no other is made for its range';
        RETURN NEXT;
    END LOOP;
END $body$;

-- The ranges up to the look-ahead for which a partition can be made. None begins
-- within the next interval: one that is attached while somebody plans a query
-- hides rows that the snapshot of that query sees. Ranges begin where the one
-- before ends, and end at a multiple of the interval. problem says why one cannot
-- be made, if it cannot.
CREATE FUNCTION outbox.upkeep_ranges(OUT lower timestamptz, OUT upper timestamptz, OUT problem text) RETURNS SETOF record
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $body$
DECLARE
    width numeric := outbox.upkeep_setting('partition_interval'::text, 1::numeric, 2678400::numeric);
    ahead numeric := outbox.upkeep_setting('look_ahead'::text, 0::numeric, 1000 * width);
    moment timestamptz := clock_timestamp();
    -- With some time to make it.
    place timestamptz := moment + make_interval(secs => (width + least(width, 5))::float8);
    until timestamptz := moment + make_interval(secs => greatest(ahead, 3 * width)::float8);
    lowers timestamptz[];
    uppers timestamptz[];
    ends timestamptz;
    adjacent boolean := false;
    newest timestamptz;
    hit boolean;
    looked boolean := false;
    made integer := 0;
BEGIN
    SELECT array_agg(a.lower), array_agg(a.upper) INTO lowers, uppers FROM outbox.upkeep_attached(NULL::text) a
    WHERE a.lower IS NOT NULL AND a.upper > moment;
    WHILE place <= until AND made < 1000 LOOP
        SELECT max(r.b) INTO ends FROM unnest(lowers, uppers) AS r (a, b) WHERE r.a <= place AND place < r.b;
        IF ends IS NOT NULL THEN
            EXIT WHEN ends = 'infinity';
            place := ends;
            adjacent := true;
            CONTINUE;
        END IF;
        IF NOT adjacent THEN
            adjacent := true;
            ends := to_timestamp((ceil(extract(epoch FROM place) / width) * width)::float8);
            IF ends > place THEN
                place := ends;
                CONTINUE;
            END IF;
        END IF;
        lower := place;
        upper := to_timestamp(((floor(extract(epoch FROM place) / width) + 1) * width)::float8);
        SELECT least(upper, min(r.a)) INTO upper FROM unnest(lowers, uppers) AS r (a, b) WHERE r.a > place;
        problem := NULL;
        IF NOT looked THEN
            looked := true;
            IF pg_relation_size(format('%I.messages_default', :schema)::regclass) > 0 THEN
                SELECT max(m.created_at) INTO newest FROM outbox.messages_default m;
            END IF;
        END IF;
        IF newest >= lower THEN
            SELECT EXISTS (SELECT FROM outbox.messages_default m WHERE m.created_at >= upkeep_ranges.lower AND m.created_at < upkeep_ranges.upper) INTO hit;
            IF hit THEN
                problem := 'the DEFAULT partition has messages of this range, as after a clock that was set back: they and those to come are delivered from there';
            END IF;
        END IF;
        RETURN NEXT;
        made := made + 1;
        place := upper;
    END LOOP;
END $body$;

-- A number that is kept in meta, of seconds.
CREATE FUNCTION outbox.upkeep_setting(key text, low numeric, high numeric) RETURNS numeric
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
    AS $body$
DECLARE
    kept jsonb := (SELECT m.value FROM outbox.meta m WHERE m.key = upkeep_setting.key);
    seconds numeric;
BEGIN
    IF jsonb_typeof(kept) = 'number' THEN
        seconds := kept::numeric;
        IF seconds >= upkeep_setting.low AND seconds <= upkeep_setting.high AND seconds = floor(seconds) THEN
            RETURN seconds;
        END IF;
    END IF;
    RAISE EXCEPTION 'outbox: % in table meta must be whole seconds between % and %, is %',
        upkeep_setting.key, upkeep_setting.low, upkeep_setting.high, coalesce(kept::text, 'missing')
        USING ERRCODE = 'invalid_parameter_value';
END $body$;

-- How many seconds a partition covers.
CREATE FUNCTION outbox.upkeep_width() RETURNS double precision
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $body$ SELECT outbox.upkeep_setting('partition_interval'::text, 1::numeric, 2678400::numeric)::float8 $body$;

-- Refuses a range that is too near, or too far: every partition costs every reader.
CREATE FUNCTION outbox.upkeep_require_future(lower timestamptz, upper timestamptz) RETURNS void
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    AS $body$
DECLARE
    width interval := make_interval(secs => outbox.upkeep_width());
BEGIN
    IF lower IS NULL OR upper IS NULL OR upper <= lower OR upper - lower > interval '62 days' THEN
        RAISE EXCEPTION 'outbox: % to % is no range for a partition', lower, upper USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF lower < clock_timestamp() + width THEN
        RAISE EXCEPTION 'outbox: a partition that begins at % can be attached no more: that is within the next interval (%)', lower, width
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF upper > clock_timestamp() + 2 * width + make_interval(secs => greatest(outbox.upkeep_setting('look_ahead'::text, 0::numeric, 1000 * extract(epoch FROM width)::numeric)::float8,
        3 * extract(epoch FROM width)::float8)) THEN
        RAISE EXCEPTION 'outbox: % to % lies behind look_ahead in table meta', lower, upper USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $body$;

-- Makes the partition of a range: 'made', or 'guard' if the DEFAULT partition must
-- first be proven empty of it, by upkeep_guard and upkeep_validate. It locks the
-- DEFAULT partition, which nobody publishes to who finds another.
CREATE FUNCTION outbox.upkeep_make(lower timestamptz, upper timestamptz) RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' SET DateStyle = 'ISO, YMD' SET lock_timeout = '50ms'
    AS $body$
DECLARE
    made text := 'messages_' || to_char(lower AT TIME ZONE 'UTC', 'YYYYMMDD"t"HH24MISS');
    spare regclass := format('%I.messages_default', :schema)::regclass;
BEGIN
    PERFORM outbox.upkeep_enter();
    PERFORM outbox.upkeep_require_future(lower, upper);
    IF to_regclass(format('%I.%I', :schema, made)) IS NOT NULL THEN
        RAISE EXCEPTION 'outbox: % is in the way of the partition from % to %: rename or drop it; until then messages of that time go into the DEFAULT partition',
            format('%I.%I', :schema, made), lower, upper USING ERRCODE = 'duplicate_table';
    END IF;
    -- An empty one is searched in no time.
    IF pg_relation_size(spare) > 0 AND NOT EXISTS (
        SELECT FROM pg_constraint k, outbox.upkeep u
        WHERE k.conrelid = spare AND k.conname = 'upkeep_guard' AND k.convalidated
            AND u.guard_lower <= upkeep_make.lower AND u.guard_upper >= upkeep_make.upper AND clock_timestamp() < u.guard_until)
    THEN
        RETURN 'guard';
    END IF;
    -- The DEFAULT partition is locked from ATTACH to the end of the commit, so what
    -- can be done before is, such as the indexes, and the disk is not waited for: if
    -- the server crashes the partition is made again, and what was stored in it
    -- cannot be on the disk before it is.
    PERFORM set_config('synchronous_commit', 'off', true);
    EXECUTE format('CREATE TABLE %1$I.%2$I (LIKE %1$I.messages INCLUDING ALL EXCLUDING IDENTITY)', :schema, made);
    -- For the day on which a row must be deleted from it while somebody publishes
    -- all tables: see messages_default.
    EXECUTE format('ALTER TABLE %I.%I REPLICA IDENTITY FULL', :schema, made);
    EXECUTE format('ALTER TABLE %1$I.messages ATTACH PARTITION %1$I.%2$I FOR VALUES FROM (%3$L) TO (%4$L)', :schema, made, lower, upper);
    INSERT INTO outbox.partitions (name, lower, upper) VALUES (made, upkeep_make.lower, upkeep_make.upper)
    ON CONFLICT ON CONSTRAINT partitions_pkey DO UPDATE
    SET lower = excluded.lower, upper = excluded.upper, state = 'open', waits_for = '{}', seal = NULL, seal_era = NULL, sealed_at = NULL,
        delivered_at = NULL, archived_at = NULL, freed_at = NULL, held_by = NULL, held_since = NULL, error = NULL, error_at = NULL;
    -- The range was sealed before, by a clock that was ahead.
    UPDATE outbox.upkeep u SET voids = u.voids + 1 WHERE u.sealed_to > upkeep_make.lower;
    RETURN 'made';
END $body$;

-- Keeps rows of a range out of the DEFAULT partition, so that once this is
-- validated a partition of the range can be attached without a search for them
-- under its lock. An insert must never fail for it, whatever becomes of upkeep: it
-- is over by itself half an interval before the range begins.
CREATE FUNCTION outbox.upkeep_guard(lower timestamptz, upper timestamptz) RETURNS void
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' SET DateStyle = 'ISO, YMD' SET lock_timeout = '50ms'
    AS $body$
DECLARE
    ends timestamptz := lower - make_interval(secs => outbox.upkeep_width() / 2);
BEGIN
    PERFORM outbox.upkeep_enter();
    PERFORM outbox.upkeep_require_future(lower, lower + interval '1 second');
    IF upper IS NULL OR upper <= lower THEN
        RAISE EXCEPTION 'outbox: % to % is no range', lower, upper USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true); -- see upkeep_make
    EXECUTE format('ALTER TABLE %1$I.messages_default DROP CONSTRAINT IF EXISTS upkeep_guard, ADD CONSTRAINT upkeep_guard '
        'CHECK (created_at < %2$L::timestamptz OR created_at >= %3$L::timestamptz OR %1$I.upkeep_passed(%4$L::timestamptz)) NOT VALID',
        :schema, lower, upper, ends);
    UPDATE outbox.upkeep u SET guard_lower = upkeep_guard.lower, guard_upper = upkeep_guard.upper, guard_until = ends;
END $body$;

-- Proves what upkeep_guard says. It reads all of the DEFAULT partition and keeps
-- nobody from reading or writing it.
CREATE FUNCTION outbox.upkeep_validate() RETURNS void
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
BEGIN
    PERFORM outbox.upkeep_enter();
    EXECUTE format('ALTER TABLE %I.messages_default VALIDATE CONSTRAINT upkeep_guard', :schema);
END $body$;

-- Takes the guard away, if there is one.
CREATE FUNCTION outbox.upkeep_unguard() RETURNS boolean
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_constraint k WHERE k.conname = 'upkeep_guard' AND k.conrelid = to_regclass(format('%I.messages_default', :schema)))
    THEN
        RETURN false;
    END IF;
    PERFORM outbox.upkeep_enter();
    PERFORM set_config('synchronous_commit', 'off', true); -- see upkeep_make
    EXECUTE format('ALTER TABLE %I.messages_default DROP CONSTRAINT IF EXISTS upkeep_guard', :schema);
    UPDATE outbox.upkeep u SET guard_lower = NULL, guard_upper = NULL, guard_until = NULL;
    RETURN true;
END $body$;

-- The row of a partition that is attached, and its quoted name; an error if it is
-- not one of those that upkeep looks after.
CREATE FUNCTION outbox.upkeep_partition(INOUT name text, OUT relation oid, OUT quoted text, OUT lower timestamptz, OUT upper timestamptz,
        OUT state text, OUT waits_for text[], OUT seal pg_snapshot, OUT seal_era bigint, OUT sealed_at timestamptz,
        OUT delivered_at timestamptz, OUT archived_at timestamptz, OUT freed_at timestamptz)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    AS $body$
#variable_conflict use_column
BEGIN
    PERFORM outbox.upkeep_enter();
    SELECT a.relation, format('%I.%I', :schema, a.name), q.lower, q.upper, q.state, q.waits_for, q.seal, q.seal_era, q.sealed_at,
        q.delivered_at, q.archived_at, q.freed_at
    INTO upkeep_partition.relation, upkeep_partition.quoted, upkeep_partition.lower, upkeep_partition.upper, upkeep_partition.state,
        upkeep_partition.waits_for, upkeep_partition.seal, upkeep_partition.seal_era, upkeep_partition.sealed_at,
        upkeep_partition.delivered_at, upkeep_partition.archived_at, upkeep_partition.freed_at
    FROM outbox.partitions q
    JOIN outbox.upkeep_attached(upkeep_partition.name) a ON a.name = q.name AND a.kind IN ('ours', 'default')
        AND (a.lower, a.upper) IS NOT DISTINCT FROM (q.lower, q.upper)
    WHERE q.name = upkeep_partition.name;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'outbox: % is not a partition that upkeep looks after', quote_ident(upkeep_partition.name)
            USING ERRCODE = 'undefined_table';
    END IF;
END $body$;

-- Who holds locks on the log, of these modes.
CREATE FUNCTION outbox.upkeep_lockers(modes text[]) RETURNS text[]
    LANGUAGE sql VOLATILE
    SET search_path = pg_catalog, pg_temp
    AS $body$
        SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}') FROM pg_locks l
        WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            AND l.relation = format('%I.messages', :schema)::regclass AND l.mode = ANY (modes)
    $body$;

-- Goes on with the seal of a partition: 'early', 'waiting' or 'sealed'. delay is
-- how many seconds its upper bound must have passed by.
--
-- created_at is taken while a statement holds ROW EXCLUSIVE on the log. Who has that
-- lock now may have taken one within the range, and those are waited for. Whoever
-- gets it later takes a later one. Then nobody writes to the partition any more,
-- which the lock on it makes sure of, and the statement that comes after the lock
-- sees all that was written. Nobody is made to wait.
--
-- Of the DEFAULT partition it marks what there is: 'empty' if there is nothing.
CREATE FUNCTION outbox.upkeep_seal(name text, delay double precision) RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
DECLARE
    p record;
    writers text[];
    filled boolean;
BEGIN
    SELECT * INTO p FROM outbox.upkeep_partition(name);
    IF p.state NOT IN ('open', 'waiting') THEN
        RETURN p.state;
    END IF;
    IF p.upper IS NULL THEN
        EXECUTE format('SELECT EXISTS (SELECT FROM %s)', p.quoted) INTO filled;
        IF NOT filled THEN
            RETURN 'empty';
        END IF;
        UPDATE outbox.partitions q SET state = 'sealed', seal = pg_current_snapshot(), seal_era = outbox.era(), sealed_at = clock_timestamp()
        WHERE q.name = upkeep_seal.name;
        RETURN 'sealed';
    END IF;
    IF p.upper + make_interval(secs => greatest(delay, 0)) > clock_timestamp() THEN
        RETURN 'early';
    END IF;
    writers := outbox.upkeep_lockers('{RowExclusiveLock,ShareRowExclusiveLock,ExclusiveLock,AccessExclusiveLock}'::text[]);
    IF p.state = 'waiting' THEN
        writers := ARRAY(SELECT w FROM unnest(writers) AS w WHERE w = ANY (p.waits_for) ORDER BY w);
    END IF;
    IF cardinality(writers) > 0 THEN
        UPDATE outbox.partitions q SET state = 'waiting', waits_for = writers WHERE q.name = upkeep_seal.name;
        RETURN 'waiting';
    END IF;
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE NOWAIT', p.quoted);
    UPDATE outbox.partitions q
    SET state = 'sealed', seal = pg_current_snapshot(), seal_era = outbox.era(), sealed_at = clock_timestamp(), waits_for = '{}',
        delivered_at = NULL, archived_at = NULL, held_by = NULL, held_since = NULL
    WHERE q.name = upkeep_seal.name;
    UPDATE outbox.upkeep u SET sealed_to = greatest(u.sealed_to, p.upper);
    RETURN 'sealed';
END $body$;

-- Rows that a seal does not see, and for that reason a reader may pass over: an
-- insert into the past, as after a clock that was set back. Where they are, at
-- most so many, the oldest ids first if it is a few. By topic, for the index begins
-- with it; and not from xmin(seal) on, below which there is nothing if a transaction
-- was open all over the time of the partition; nor beyond what this cluster has
-- issued, where there are ids of others.
--
-- A seal says something of the rows of its own era, on whichever cluster.
CREATE FUNCTION outbox.upkeep_unseen(quoted text, seal pg_snapshot, seal_era bigint, most integer) RETURNS tid[]
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off
    AS $body$
DECLARE
    found tid[];
BEGIN
    EXECUTE format($q$
        WITH RECURSIVE topic (name) AS (
            (SELECT m.topic FROM ONLY %1$s m ORDER BY m.topic LIMIT 1)
            UNION ALL
            SELECT (SELECT m.topic FROM ONLY %1$s m WHERE m.topic > t.name ORDER BY m.topic LIMIT 1) FROM topic t WHERE t.name IS NOT NULL
        )
        SELECT array_agg(r.place) FROM (
            -- The era is no part of what is searched by: the planner would take the
            -- index that has it, and read all of the topic.
            SELECT l.place FROM topic t CROSS JOIN LATERAL (
                SELECT b.* FROM (SELECT m.ctid AS place, m.id, m.era FROM ONLY %1$s m WHERE m.topic = t.name AND m.xid >= pg_snapshot_xmax($1) AND m.xid < $4 OFFSET 0) AS b
                UNION ALL
                SELECT b.* FROM pg_snapshot_xip($1) AS x
                CROSS JOIN LATERAL (SELECT m.ctid, m.id, m.era FROM ONLY %1$s m WHERE m.topic = t.name AND m.xid = x OFFSET 0) AS b
            ) AS l
            WHERE t.name IS NOT NULL AND l.era = $2
            ORDER BY CASE WHEN $3 > 1 THEN l.id END LIMIT $3
        ) AS r
        $q$, quoted) INTO found USING seal, seal_era, most,
            CASE WHEN seal_era = outbox.era() THEN pg_snapshot_xmax(pg_current_snapshot()) ELSE '18446744073709551615'::xid8 END;
    RETURN coalesce(found, '{}');
END $body$;

-- Publishes again what a seal does not see, at most so many rows, how many there
-- were, and voids the seal when nothing is left: the partition is open again.
--
-- It returns -1 where upkeep_identify must come first.
--
-- Readers that remember the seal do not look into the partition. So the new rows are
-- of a time behind all that was ever sealed, whatever the clock says, and the seal is
-- not void before all is moved: the next one would see what is left, and nobody would
-- find it. That takes a moment in which nobody is writing there. Without one the seal
-- stays, and what is still being written is found by the next call.
CREATE FUNCTION outbox.upkeep_strays(name text, most integer) RETURNS integer
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
DECLARE
    p record;
    moved integer;
    more integer;
    few CONSTANT integer := 100;
BEGIN
    SELECT * INTO p FROM outbox.upkeep_partition(name);
    IF p.upper IS NULL OR p.state NOT IN ('sealed', 'freed') THEN
        RETURN 0;
    END IF;
    most := least(greatest(most, 1), 1000);
    IF cardinality(outbox.upkeep_unseen(p.quoted, p.seal, p.seal_era, 1)) = 0 THEN
        -- One of another cluster says nothing of what was written on this one.
        IF p.seal_era <> outbox.era() THEN
            PERFORM outbox.upkeep_reopen(name);
        END IF;
        RETURN 0;
    END IF;
    IF (SELECT c.relreplident FROM pg_class c WHERE c.oid = p.relation) <> 'f' AND EXISTS (SELECT FROM pg_publication u WHERE u.pubdelete) THEN
        RETURN -1; -- somebody may publish what is deleted from it
    END IF;
    moved := outbox.upkeep_move(p.quoted, p.seal, p.seal_era, most);
    IF moved = most THEN
        RETURN moved;
    END IF;
    BEGIN
        EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE NOWAIT', p.quoted);
    EXCEPTION WHEN lock_not_available THEN
        RETURN moved;
    END;
    -- What was committed since the first look; a few, for now writers wait.
    more := outbox.upkeep_move(p.quoted, p.seal, p.seal_era, few);
    moved := moved + more;
    IF more = few THEN
        RETURN moved;
    END IF;
    PERFORM outbox.upkeep_reopen(name);
    RETURN moved;
END $body$;

-- Ends a seal: the partition, or what is marked of the DEFAULT one, is as it was
-- before.
CREATE FUNCTION outbox.upkeep_reopen(name text) RETURNS void
    LANGUAGE sql VOLATILE
    SET search_path = pg_catalog, pg_temp
    AS $body$
        UPDATE outbox.partitions q
        SET state = 'open', waits_for = '{}', seal = NULL, seal_era = NULL, sealed_at = NULL, delivered_at = NULL, archived_at = NULL,
            freed_at = NULL, held_by = NULL, held_since = NULL, voided = q.voided + 1
        WHERE q.name = upkeep_reopen.name;
        UPDATE outbox.upkeep u SET voids = u.voids + 1;
    $body$;

-- Lets rows be deleted from a partition while somebody publishes all tables: see
-- messages_default. A step of its own, since publishers wait for the lock.
CREATE FUNCTION outbox.upkeep_identify(name text) RETURNS void
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
DECLARE
    p record;
BEGIN
    SELECT * INTO p FROM outbox.upkeep_partition(name);
    IF (SELECT c.relreplident FROM pg_class c WHERE c.oid = p.relation) <> 'f' THEN
        EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', p.quoted);
    END IF;
END $body$;

-- Publishes again at most so many rows that a seal does not see, and deletes them.
CREATE FUNCTION outbox.upkeep_move(quoted text, seal pg_snapshot, seal_era bigint, most integer) RETURNS integer
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    AS $body$
DECLARE
    places tid[] := outbox.upkeep_unseen(quoted, seal, seal_era, most);
    moved integer;
BEGIN
    IF cardinality(places) = 0 THEN
        RETURN 0;
    END IF;
    EXECUTE format($q$
        WITH gone AS (
            DELETE FROM ONLY %1$s m WHERE m.ctid = ANY ($1)
            RETURNING m.era, m.id, m.topic, m.key, m.uuid, m.metadata, m.payload, m.target_group, m.attempt
        ), put AS (
            INSERT INTO %2$I.messages (topic, key, uuid, metadata, payload, target_group, attempt, created_at)
            SELECT g.topic, g.key, g.uuid, g.metadata, g.payload, g.target_group, g.attempt,
                greatest(clock_timestamp(), (SELECT u.sealed_to FROM %2$I.upkeep u))
            FROM gone g ORDER BY g.era, g.id
        )
        SELECT count(*) FROM gone
        $q$, quoted, :schema) INTO moved USING places;
    RETURN moved;
END $body$;

-- Who has not been handed out, or not acknowledged, all that the seal sees; NULL
-- if nobody. A topic counts whose rows are there, and everybody who reads it.
-- unread is after how many seconds rows may go that nobody has ever read, as long
-- as there is some group; 0 for never. Holes count by their time in a partition
-- with a range; in the DEFAULT partition they are passed over one by one.
CREATE FUNCTION outbox.upkeep_holder(name text, unread double precision) RETURNS jsonb
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off
    AS $body$
DECLARE
    p record;
    old boolean;
    answer jsonb;
BEGIN
    SELECT * INTO p FROM outbox.upkeep_partition(name);
    IF p.seal IS NULL THEN
        RAISE EXCEPTION 'outbox: partition % is not sealed', p.quoted USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF NOT EXISTS (SELECT FROM outbox.cursors) THEN
        RETURN jsonb_build_object('reason', 'no group has ever subscribed to anything');
    END IF;
    old := unread > 0 AND coalesce(p.upper, p.sealed_at) + make_interval(secs => unread) < clock_timestamp();
    EXECUTE format($q$
        WITH RECURSIVE topic (name) AS (
            (SELECT m.topic FROM ONLY %1$s m ORDER BY m.topic LIMIT 1)
            UNION ALL
            SELECT (SELECT m.topic FROM ONLY %1$s m WHERE m.topic > t.name ORDER BY m.topic LIMIT 1) FROM topic t WHERE t.name IS NOT NULL
        )
        SELECT jsonb_build_object('group', r.consumer_group, 'topic', r.name, 'shard', r.shard, 'reason', r.reason) FROM (
            SELECT t.name, c.consumer_group, c.shard, CASE
                WHEN c.consumer_group IS NULL THEN CASE WHEN NOT $6 THEN 'no group has ever subscribed to the topic' END
                WHEN c.era <> $3 THEN 'the group has not read since the move to this cluster'
                WHEN c.step = 'past' THEN 'the group is being handed out what other clusters wrote'
                WHEN $2 = $3 AND NOT %2$I.upkeep_covers(c.p, $1)
                    AND NOT (c.until IS NOT NULL AND c.step = 'idle' AND (c.until_era <> c.era OR %2$I.upkeep_covers(c.p, c.until)))
                    THEN 'the group has not been handed out all of it'
                WHEN $4 IS NOT NULL AND EXISTS (
                    SELECT FROM jsonb_array_elements(c.holes) AS h (hole)
                    WHERE ((h.hole ->> 'created_at')::timestamptz >= $4 AND (h.hole ->> 'created_at')::timestamptz < $5)
                        OR coalesce((h.hole ->> 'created_at')::timestamptz, '-infinity') < timestamptz '2000-01-01 00:00:00+00')
                    THEN 'the group has not acknowledged all of it'
                END AS reason
            FROM topic t
            LEFT JOIN %2$I.cursors c ON c.topic = t.name OR (c.patterns IS NOT NULL AND t.name LIKE ANY (c.patterns))
            WHERE t.name IS NOT NULL
        ) AS r
        WHERE r.reason IS NOT NULL
        ORDER BY r.consumer_group IS NULL, r.consumer_group, r.name, r.shard
        LIMIT 1
        $q$, p.quoted, :schema) INTO answer USING p.seal, p.seal_era, outbox.era(), p.lower, p.upper, old;
    RETURN answer;
END $body$;

-- Looks whether all of a sealed partition was delivered, and notes since when, or
-- who holds it back.
CREATE FUNCTION outbox.upkeep_look(name text, unread double precision) RETURNS jsonb
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $body$
DECLARE
    p record;
    who jsonb;
BEGIN
    SELECT * INTO p FROM outbox.upkeep_partition(name);
    IF p.state <> 'sealed' THEN
        RETURN NULL;
    END IF;
    IF p.upper IS NULL AND p.seal_era <> outbox.era() THEN
        PERFORM outbox.upkeep_reopen(name); -- marked on another cluster: mark again
        RETURN NULL;
    END IF;
    who := outbox.upkeep_holder(name, unread);
    UPDATE outbox.partitions q
    SET delivered_at = CASE WHEN who IS NULL THEN least(q.delivered_at, clock_timestamp()) END,
        archived_at = CASE WHEN who IS NULL THEN q.archived_at END,
        held_by = who, held_since = CASE WHEN who IS NOT NULL THEN coalesce(q.held_since, clock_timestamp()) END
    WHERE q.name = upkeep_look.name
        -- By a clock that was ahead it may have been delivered in what is now the future.
        AND (q.held_by IS DISTINCT FROM who OR (q.delivered_at IS NULL) <> (who IS NOT NULL) OR q.delivered_at > clock_timestamp());
    RETURN who;
END $body$;

-- Notes that a sealed partition was archived, in the state that this seal saw.
CREATE FUNCTION outbox.upkeep_archived(name text, seal pg_snapshot) RETURNS boolean
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $body$
BEGIN
    PERFORM outbox.upkeep_enter();
    UPDATE outbox.partitions q SET archived_at = clock_timestamp()
    WHERE q.name = upkeep_archived.name AND q.state = 'sealed' AND q.delivered_at IS NOT NULL AND q.seal::text = upkeep_archived.seal::text;
    RETURN FOUND;
END $body$;

-- Empties a sealed partition that was delivered so many seconds ago: 'freed', or
-- why not: 'early', 'unarchived', 'held', 'stray'. All is looked at again when
-- nobody can write there any more. Readers may wait for as long.
CREATE FUNCTION outbox.upkeep_free(name text, retention double precision, unread double precision, archived boolean) RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
DECLARE
    p record;
BEGIN
    SELECT * INTO p FROM outbox.upkeep_partition(name);
    IF p.upper IS NULL OR p.state <> 'sealed' THEN
        RETURN p.state;
    END IF;
    IF p.delivered_at IS NULL THEN
        RETURN 'held';
    END IF;
    IF p.delivered_at + make_interval(secs => greatest(retention, 0)) > clock_timestamp() THEN
        RETURN 'early';
    END IF;
    IF archived AND p.archived_at IS NULL THEN
        RETURN 'unarchived';
    END IF;
    IF p.seal_era <> outbox.era() THEN
        RETURN 'stray';
    END IF;
    EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', p.quoted);
    IF cardinality(outbox.upkeep_unseen(p.quoted, p.seal, p.seal_era, 1)) > 0 THEN
        RETURN 'stray';
    END IF;
    IF outbox.upkeep_holder(name, unread) IS NOT NULL THEN
        RETURN 'held';
    END IF;
    EXECUTE format('TRUNCATE ONLY %s', p.quoted);
    UPDATE outbox.partitions q SET state = 'freed', freed_at = clock_timestamp(), held_by = NULL, held_since = NULL WHERE q.name = upkeep_free.name;
    RETURN 'freed';
END $body$;

-- Drops the shell of a partition that was freed: 'dropped', 'busy' while somebody
-- stays on the log, 'stray' if there are rows again. Publishers wait for it, so it
-- is not tried while a transaction that has locks on the log does not end: first
-- the log is locked, for which all others are waited for, 50 ms at most; the rest
-- must be free by then.
CREATE FUNCTION outbox.upkeep_drop(name text) RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
DECLARE
    p record;
    modes text[] := '{AccessShareLock,RowShareLock,RowExclusiveLock,ShareUpdateExclusiveLock,ShareLock,ShareRowExclusiveLock,ExclusiveLock,AccessExclusiveLock}';
    there text[];
    filled boolean;
BEGIN
    SELECT * INTO p FROM outbox.upkeep_partition(name);
    IF p.state <> 'freed' THEN
        RETURN p.state;
    END IF;
    there := outbox.upkeep_lockers(modes);
    IF cardinality(there) > 0 THEN
        PERFORM pg_sleep(0.02);
        IF outbox.upkeep_lockers(modes) && there THEN
            RETURN 'busy';
        END IF;
    END IF;
    EXECUTE format('LOCK TABLE ONLY %I.messages IN ACCESS EXCLUSIVE MODE', :schema);
    EXECUTE format('LOCK TABLE ONLY %I.messages_default IN ACCESS EXCLUSIVE MODE NOWAIT', :schema);
    EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE NOWAIT', p.quoted);
    EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s)', p.quoted) INTO filled;
    IF filled THEN
        RETURN 'stray';
    END IF;
    EXECUTE format('DROP TABLE %s', p.quoted);
    DELETE FROM outbox.partitions q WHERE q.name = upkeep_drop.name;
    RETURN 'dropped';
END $body$;

-- Deletes from the DEFAULT partition, of those of the next so many rows behind a
-- place (topic, era, id) that the mark sees, all that were delivered so many
-- seconds ago and are nobody's holes. seen is how many it looked at: fewer than asked for
-- at the end, when the mark is taken away, or when it is too early; -1 if what the mark
-- sees is to be archived first.
CREATE FUNCTION outbox.upkeep_delete(INOUT topic text, INOUT era bigint, INOUT id bigint, retention double precision, unread double precision,
        archived boolean, most integer, OUT seen integer, OUT deleted integer)
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = '50ms'
    AS $body$
DECLARE
    p record;
    last record;
BEGIN
    seen := 0;
    deleted := 0;
    most := least(greatest(most, 1), 1000);
    SELECT * INTO p FROM outbox.upkeep_partition('messages_default'::text);
    IF p.state <> 'sealed' OR p.seal_era <> outbox.era() OR p.delivered_at IS NULL
        OR p.delivered_at + make_interval(secs => greatest(retention, 0)) > clock_timestamp()
    THEN
        RETURN;
    END IF;
    -- Whoever moves a position locks its row to change the key first: what is looked at
    -- here still holds for the rows that the next statement deletes. Checkpoints go on.
    PERFORM FROM outbox.cursors FOR KEY SHARE;
    IF outbox.upkeep_holder('messages_default'::text, unread) IS NOT NULL THEN
        RETURN;
    END IF;
    IF archived AND p.archived_at IS NULL THEN
        seen := -1;
        RETURN;
    END IF;
    EXECUTE format($q$
        WITH hole AS MATERIALIZED (
            SELECT (h.hole ->> 'era')::bigint AS era, (h.hole ->> 'id')::bigint AS id
            FROM %2$I.cursors c CROSS JOIN LATERAL jsonb_array_elements(c.holes) AS h (hole)
        ), page AS MATERIALIZED (
            SELECT m.ctid AS place, m.topic, m.era, m.id, m.xid FROM ONLY %1$s m
            WHERE (m.topic, m.era, m.id) > ($1, $2, $3)
            ORDER BY m.topic, m.era, m.id LIMIT $4
        ), gone AS (
            DELETE FROM ONLY %1$s m
            WHERE m.ctid = ANY (ARRAY(
                SELECT p.place FROM page p
                WHERE (p.era <> $6 OR pg_visible_in_snapshot(p.xid, $5)) AND (p.era, p.id) NOT IN (SELECT h.era, h.id FROM hole h)))
            RETURNING 1
        )
        SELECT (SELECT count(*) FROM page)::integer AS seen, (SELECT count(*) FROM gone)::integer AS deleted, l.topic, l.era, l.id
        FROM (SELECT) AS one
        LEFT JOIN (SELECT p.* FROM page p ORDER BY p.topic DESC, p.era DESC, p.id DESC LIMIT 1) AS l ON true
        $q$, p.quoted, :schema) INTO last USING coalesce(topic, ''), coalesce(era, 0), coalesce(id, 0), most, p.seal, p.seal_era;
    seen := last.seen;
    deleted := last.deleted;
    IF seen > 0 THEN
        topic := last.topic;
        era := last.era;
        id := last.id;
    END IF;
    IF seen < most THEN
        UPDATE outbox.partitions q
        SET state = 'open', seal = NULL, seal_era = NULL, sealed_at = NULL, delivered_at = NULL, archived_at = NULL, freed_at = clock_timestamp(),
            held_by = NULL, held_since = NULL
        WHERE q.name = 'messages_default';
    END IF;
END $body$;

-- Removes what is older than so many seconds, at most so many rows: of 'inbox',
-- 'dead_letters' (which the log tells of) and 'dead_letter_log' (of letters that are
-- gone).
CREATE FUNCTION outbox.upkeep_sweep(what text, age double precision, most integer) RETURNS integer
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
DECLARE
    until timestamptz := clock_timestamp() - make_interval(secs => age);
    gone integer;
BEGIN
    IF age IS NULL OR age <= 0 THEN
        RAISE EXCEPTION 'outbox: the age of what is swept must be positive, is %', age USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM outbox.upkeep_enter();
    most := least(greatest(most, 1), 1000);
    CASE what
    WHEN 'inbox' THEN
        WITH old AS MATERIALIZED (
            SELECT i.ctid AS place FROM outbox.inbox i WHERE i.handled_at < until ORDER BY i.handled_at LIMIT most FOR UPDATE SKIP LOCKED
        )
        DELETE FROM outbox.inbox i WHERE i.ctid = ANY (ARRAY(SELECT o.place FROM old o));
    WHEN 'dead_letters' THEN
        WITH old AS MATERIALIZED (
            SELECT d.id FROM outbox.dead_letters d WHERE d.died_at < until ORDER BY d.id LIMIT most FOR UPDATE SKIP LOCKED
        ), gone AS (
            DELETE FROM outbox.dead_letters d WHERE d.id = ANY (ARRAY(SELECT o.id FROM old o)) RETURNING d.*
        ), log AS (
            INSERT INTO outbox.dead_letter_log (action, reason, dead_letter_id, consumer_group, topic, key, uuid, origin_era, origin_id, attempts)
            SELECT 'discarded', 'older than the retention of dead letters', g.id, g.consumer_group, g.topic, g.key, g.uuid, g.origin_era, g.origin_id, g.attempts FROM gone g
        )
        SELECT count(*) INTO gone FROM gone;
        RETURN gone;
    WHEN 'dead_letter_log' THEN
        WITH old AS MATERIALIZED (
            SELECT l.id FROM outbox.dead_letter_log l
            WHERE l.at < until AND NOT EXISTS (SELECT FROM outbox.dead_letters d WHERE d.id = l.dead_letter_id)
            ORDER BY l.at LIMIT most FOR UPDATE SKIP LOCKED
        )
        DELETE FROM outbox.dead_letter_log l WHERE l.id = ANY (ARRAY(SELECT o.id FROM old o));
    ELSE
        RAISE EXCEPTION 'outbox: there is nothing to sweep in %', what USING ERRCODE = 'invalid_parameter_value';
    END CASE;
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone;
END $body$;

-- Removes processes that have died with these last beats, and what they wanted. One
-- that only slept comes back by its next beat.
CREATE FUNCTION outbox.upkeep_bury(holders text[], beats bigint[]) RETURNS integer
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
    AS $body$
DECLARE
    gone integer;
BEGIN
    PERFORM outbox.upkeep_enter();
    WITH old AS MATERIALIZED (
        SELECT p.holder FROM outbox.processes p
        JOIN unnest(holders, beats) AS d (holder, beat) ON d.holder = p.holder AND d.beat = p.beat
        FOR UPDATE OF p SKIP LOCKED
    ), wanted AS (
        DELETE FROM outbox.members m WHERE m.holder IN (SELECT o.holder FROM old o)
    )
    DELETE FROM outbox.processes p WHERE p.holder IN (SELECT o.holder FROM old o);
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone;
END $body$;

-- Notes how the last step of a partition went: NULL for well.
CREATE FUNCTION outbox.upkeep_note(name text, error text) RETURNS void
    LANGUAGE sql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $body$
        UPDATE outbox.partitions q
        SET error = upkeep_note.error, error_at = CASE WHEN upkeep_note.error IS NOT NULL THEN clock_timestamp() END
        WHERE q.name = upkeep_note.name AND (q.error IS DISTINCT FROM upkeep_note.error)
    $body$;

-- Nobody has these who was not given them (schema.Grants). The exception is part
-- of a constraint, which is checked with the rights of whoever inserts.
DO $body$
DECLARE
    function regprocedure;
BEGIN
    FOR function IN
        SELECT p.oid::regprocedure FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = :schema AND p.proname LIKE 'upkeep\_%' AND p.proname <> 'upkeep_passed'
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', function);
    END LOOP;
END $body$;

-- The partitions that there are.
SELECT count(*) FROM outbox.upkeep_sync();
