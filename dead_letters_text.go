package outbox

import "fmt"

// The statements of DeadLetters. Every parameter's type is written out, as in
// insertText; %s and %[n]s stand for conditions and parameters.

const (
	// listBytes is where a page of a list ends.
	listBytes = 8 << 20
	// moveRows and moveBytes bound what one statement moves. A transaction with
	// much more in it would be a large one to whoever decodes the WAL.
	moveRows  = 1000
	moveBytes = 16 << 20
)

// The running sum of sizes ends the page. Sizes of payloads are known without
// reading them.
const listDeadLetters = `
SELECT p.id, p.consumer_group, p.topic, coalesce(p.key, ''), p.uuid, p.metadata::text, p.payload,
       p.origin_era, p.origin_id, p.created_at, p.attempts, p.error, p.died_at
FROM (
    SELECT r.*, sum(r.size) OVER (ORDER BY r.id ROWS UNBOUNDED PRECEDING) AS total FROM (
        SELECT d.*, 100 + coalesce(octet_length(d.payload), 0)::bigint + octet_length(d.metadata::text) + octet_length(d.error) AS size
        FROM outbox.dead_letters d WHERE %s ORDER BY d.id LIMIT %s::bigint
    ) AS r
) AS p
WHERE p.total - p.size < %s::bigint
ORDER BY p.id`

const countDeadLetters = `SELECT count(*) FROM outbox.dead_letters d WHERE %s`

// topDeadLetter returns the highest id that there is, and the time.
const topDeadLetter = `SELECT coalesce(max(d.id), 0), clock_timestamp() FROM outbox.dead_letters d`

const listDeadLetterEvents = `
SELECT l.id, l.at, l.action, l.actor, l.reason, l.dead_letter_id, l.consumer_group, l.topic,
       coalesce(l.key, ''), l.uuid, l.origin_era, l.origin_id, l.attempts
FROM outbox.dead_letter_log l WHERE %s ORDER BY l.id LIMIT %s::bigint`

// What becomes of dead letters, in one statement: they are gone, are somewhere
// else, and the log has them, or nothing has happened.
//
// The rows are locked in the order of their ids first, so that two calls at once
// wait for each other and never in a circle; what the other one took is passed
// over, and does not count against the limit. Payloads stay in the server.
const moveDeadLetters = `
WITH chosen AS MATERIALIZED (
    SELECT d.id, coalesce(octet_length(d.payload), 0) AS size
    FROM outbox.dead_letters d WHERE %[1]s ORDER BY d.id LIMIT %[2]s::bigint FOR UPDATE
), kept AS MATERIALIZED (
    SELECT s.id FROM (SELECT c.id, c.size, sum(c.size) OVER (ORDER BY c.id ROWS UNBOUNDED PRECEDING) AS total FROM chosen c) AS s
    WHERE s.total - s.size < %[3]s::bigint
), gone AS (
    DELETE FROM outbox.dead_letters d WHERE d.id = ANY (ARRAY(SELECT k.id FROM kept k)) RETURNING d.*
), logged AS (
    INSERT INTO outbox.dead_letter_log (action, actor, reason, dead_letter_id, consumer_group, topic, key, uuid, origin_era, origin_id, attempts)
    SELECT %[4]s::text, coalesce(nullif(%[5]s::text, ''), current_user::text), %[6]s::text,
           g.id, g.consumer_group, g.topic, g.key, g.uuid, g.origin_era, g.origin_id, g.attempts
    FROM gone g ORDER BY g.id
)%[7]s
SELECT count(*), coalesce(max(g.id), 0) FROM gone g`

// Ids are drawn as the sorted rows pass, so they follow the order of death.
const moveToMessages = `, back AS (
    INSERT INTO outbox.messages (topic, key, uuid, metadata, payload, target_group, attempt)
    SELECT g.topic, g.key, g.uuid, ` + withoutPoison + `, g.payload, g.consumer_group, 0
    FROM gone g ORDER BY g.id
)`

const moveToDeferred = `, back AS (
    INSERT INTO outbox.deferred (due_at, topic, key, uuid, metadata, payload, target_group, attempt)
    SELECT %[5]s::timestamptz + make_interval(secs => (%[6]s::bigint + row_number() OVER (ORDER BY g.id) - 1) / %[7]s::float8),
           g.topic, g.key, g.uuid, ` + withoutPoison + `, g.payload, g.consumer_group, 0
    FROM gone g ORDER BY g.id
)`

// withoutPoison is the metadata without what was added at death, every other byte
// as it was. It works on the text: the server's functions for JSON would decode
// the strings, and fail at escapes that it cannot, such as \u0000.
const withoutPoison = `CASE
        WHEN g.metadata::text !~ %[1]s::text OR g.metadata::text !~ %[2]s::text THEN g.metadata
        ELSE regexp_replace(regexp_replace(g.metadata::text, %[3]s::text, '', 'g'), %[4]s::text, '')::json
    END`

// Its patterns. A quote that is not escaped, a name, and a quote before a colon
// are a key and nothing else: in a string the quotes would be escaped.
const (
	poisonKey = `(?<!\\)"(?:reason|topic|handler|subscriber)_poisoned"\s*:`
	// jsonString matches any.
	jsonString = `"(?:[^"\\]|\\.)*"`
	// jsonStrings matches an object whose values are strings.
	jsonStrings = `^\s*\{\s*(?:` + jsonString + `\s*:\s*` + jsonString + `\s*(?:,\s*` + jsonString + `\s*:\s*` + jsonString + `\s*)*)?\}\s*$`
	// poisonMember matches a key with its value and the comma after it.
	poisonMember = poisonKey + `\s*` + jsonString + `\s*(?:,\s*)?`
	// danglingComma matches the comma that is left over when the last member was
	// removed.
	danglingComma = `,\s*(?=\}\s*$)`
)

// move is what becomes of dead letters.
type move int

const (
	requeueNow move = iota
	requeueLater
	discard
)

// text completes the statement, and the values of its parameters.
func (m move) text(where *conditions, limit int, actor, reason string, pace *pace) string {
	action, target := DeadLetterRequeued, ""
	switch m {
	case discard:
		action = DeadLetterDiscarded
	case requeueNow:
		target = fmt.Sprintf(moveToMessages, where.poisonArgs()...)
	case requeueLater:
		target = fmt.Sprintf(moveToDeferred, append(where.poisonArgs(),
			where.arg(pace.from), where.arg(pace.done), where.arg(pace.perSecond))...)
	}
	return fmt.Sprintf(moveDeadLetters, where, where.arg(limit), where.arg(moveBytes),
		where.arg(string(action)), where.arg(actor), where.arg(reason), target)
}

func (c *conditions) poisonArgs() []any {
	return []any{c.arg(poisonKey), c.arg(jsonStrings), c.arg(poisonMember), c.arg(danglingComma)}
}

// buryMessage makes a dead letter of a message, unless it is one, and returns
// whether there is such a message.
//
// $1 group, $2 topic, $3 era, $4 id, $5 actor, $6 reason
const buryMessage = `
WITH msg AS MATERIALIZED (
    SELECT m.* FROM outbox.messages m
    WHERE m.topic = $2::text AND m.era = $3::bigint AND m.id = $4::bigint
        AND (m.target_group IS NULL OR m.target_group = $1::text)
        AND EXISTS (SELECT FROM outbox.cursors c WHERE c.consumer_group = $1::text AND (c.topic = $2::text OR $2::text LIKE ANY (c.patterns)))
), who AS (
    SELECT coalesce(nullif($5::text, ''), current_user::text) AS actor
), dead AS (
    INSERT INTO outbox.dead_letters (consumer_group, topic, key, uuid, metadata, payload, origin_era, origin_id, created_at, attempts, error)
    SELECT $1::text, m.topic, m.key, m.uuid, m.metadata, m.payload, m.era, m.id, m.created_at, m.attempt,
           'buried by ' || who.actor || CASE WHEN $6::text <> '' THEN ': ' || $6::text ELSE '' END
    FROM msg m, who
    ON CONFLICT (consumer_group, origin_era, origin_id) DO NOTHING
    RETURNING id, consumer_group, topic, key, uuid, origin_era, origin_id, attempts
), logged AS (
    INSERT INTO outbox.dead_letter_log (action, actor, reason, dead_letter_id, consumer_group, topic, key, uuid, origin_era, origin_id, attempts)
    SELECT 'died', who.actor, $6::text, d.id, d.consumer_group, d.topic, d.key, d.uuid, d.origin_era, d.origin_id, d.attempts
    FROM dead d, who
)
SELECT count(*) FROM msg`
