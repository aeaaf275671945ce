// Package schema holds everything the outbox keeps in PostgreSQL: the tables
// and their versioned migrations, the GRANT scripts, a check that compares an
// installation with what this version of the library expects, and the text of
// the queries.
//
// # Migrations
//
// The migrations are embedded SQL files, applied in order by [Migrate] and
// printed by [SQL] for those who let nobody but their own tooling run DDL. All
// pending ones run in one transaction that first takes a transaction-level
// advisory lock (see [LockKey]), so any number of replicas may call Migrate at
// the same instant: one works, the others wait and find nothing left to do.
//
// No migration library is used. The tables live in a schema whose name the
// user chooses, so each file is a template, and the library would have to see
// it only after the name was filled in; it would bring its own version table
// outside that schema, a dependency on database/sql and several modules more;
// and what remains for it to do is the forty lines of migrate.go.
//
// # Publication
//
// Subscribers may read the WAL beside the tables, through a publication that the
// migrations make where the role may. What that takes besides (settings of the
// server, an attribute of the role) no migration can decide: [CheckLive] says
// what is missing, [PublicationSQL] and [Grants] have the statements.
//
// # Names
//
// The schema may have any name PostgreSQL accepts: upper case, blanks, quotes
// and semicolons included. It goes into SQL text only through
// [pgx.Identifier.Sanitize] or as a quoted literal.
package schema
