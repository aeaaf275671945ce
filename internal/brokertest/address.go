package brokertest

import "strings"

// addressSeparator is in no URL of a server and in no prefix.
const addressSeparator = " "

// JoinAddress returns the address of a broker: its server's, or several with commas
// between them, and the prefix of its topics.
func JoinAddress(server, prefix string) string { return server + addressSeparator + prefix }

// SplitAddress undoes JoinAddress.
func SplitAddress(address string) (server, prefix string) {
	server, prefix, _ = strings.Cut(address, addressSeparator)
	return server, prefix
}
