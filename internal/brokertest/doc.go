// Package brokertest has real brokers for tests and benchmarks of what publishes
// to them. Each is in a package of its own, so that whoever needs one compiles
// one:
//
//   - jetstream: NATS JetStream, in this process;
//   - rabbitmq: RabbitMQ, a server of the machine's programs, or the one named by
//     OUTBOX_TEST_RABBITMQ_URL;
//   - redis: Redis, a server of the machine's programs, or the one named by
//     OUTBOX_TEST_REDIS_URL;
//   - kafka: the Kafka protocol spoken by kfake in this process, or the cluster
//     named by OUTBOX_TEST_KAFKA_BROKERS;
//   - webhook: an HTTP server in this process.
//
// All are a [Broker]: they make a Watermill publisher whose connections a [Proxy]
// can cut, refuse and stall, they tell which messages are in the broker, and what
// they started they can end hard and start again on the same port and data.
//
// # Publishers
//
// A publisher reports, and does not repeat: whoever tests a retry of its own must
// not see another one's. Publish returns nil when the broker has confirmed, and
// an error within [PublishTimeout] when it has not, apart from what the broker's
// package says about it. Nothing is sent later that was reported as failed,
// unless it was on its way when the connection was lost.
//
// # Topics
//
// Brokers are shared: tests beside each other use one RabbitMQ, and a named
// server has other users. So each Broker puts a prefix of its own in front of its
// topics, which neither publishers nor Received show.
//
// # Other processes
//
// A process that is to be killed publishes to the brokers of the test that kills it:
// it is told their Address, and each package's Connect makes a publisher of that.
//
// # What is left behind
//
// Programs are started through a small shell script, which ends them and removes their
// folder when this process has ended, in whatever way. See supervisor.sh. Brokers in
// this process end with it; if it is killed their folder stays in the one for temporary
// files. On a named server the topics are deleted by Shutdown.
package brokertest
