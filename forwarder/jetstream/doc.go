// Package jetstream publishes to NATS JetStream in batches, for a forwarder. It is
// a module of its own, so that the library does not depend on NATS.
//
// The publisher of watermill-nats sends a message and waits for its
// acknowledgement, which forwarder makes up for by sending many at a time. This one
// sends what has come together without waiting in between, which takes less of the
// machine. Both write the same messages, so whoever reads with watermill-nats sees
// no difference.
package jetstream
