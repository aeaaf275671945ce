package replication

// WidenXID returns the full transaction id (xid8) of the 32 bits that Begin
// carries. The stream has only these; which of the transaction ids that end in
// them is meant follows from a reference: any full id that the same server
// issued or reported lately, say pg_snapshot_xmax(pg_current_snapshot()), before
// or after. The server keeps all ids that can occur in its WAL within 2^31 of
// its next one, so a reference less than that away is near enough.
func WidenXID(xid uint32, reference uint64) uint64 {
	// The distance modulo 2^32, in both directions.
	ahead := uint64(xid - uint32(reference&0xffffffff))
	if ahead < 1<<31 {
		return reference + ahead
	}
	behind := 1<<32 - ahead
	if behind > reference {
		// There was nothing before transaction 0.
		return reference + ahead
	}
	return reference - behind
}
