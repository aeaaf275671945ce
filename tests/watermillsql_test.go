package tests

import (
	"testing"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// Tables of watermill-sql are read below the oldest transaction that is open
// anywhere on the server, by itself and by Drain. So this has a server of its own,
// and runs one after the other: two that have a transaction open while they wait
// would wait for each other.
func TestForwardWatermillSQLTables(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{})
	t.Run("manual", func(t *testing.T) { testWatermillSQLManual(t, server) }) //nolint:paralleltest // see above
	for _, test := range []struct {
		name string
		run  func(t *testing.T, f *fixture)
	}{
		{"a handler publishes in its transaction", testWatermillSQLHandlerPublishesInItsTransaction},
		{"drain by the stock Forwarder", testWatermillSQLDrainByTheStockForwarder},
		{"drain by a Router", testWatermillSQLDrainByARouter},
		{"drain moves what is left", testWatermillSQLDrainMovesWhatIsLeft},
		{"drain of delays and envelopes", testWatermillSQLDrainOfDelaysAndEnvelopes},
		{"drain in parts", testWatermillSQLDrainInParts},
		{"drain waits for older transactions", testWatermillSQLDrainWaitsForOlderTransactions},
		{"drain beside publishers", testWatermillSQLDrainBesidePublishers},
		{"drain beside a handler of the topic", testWatermillSQLDrainBesideAHandlerOfTheTopic},
		{"drain refuses", testWatermillSQLDrainRefuses},
	} {
		t.Run(test.name, func(t *testing.T) { //nolint:paralleltest // see above
			test.run(t, fixtureAt(t, pgtest.DatabaseOn(t, server)))
		})
	}
}
