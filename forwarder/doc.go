// Package forwarder publishes what is in the outbox, or comes from any Watermill
// Subscriber, to any Watermill Publisher: NATS, Kafka, RabbitMQ, Redis, HTTP.
//
//	f, err := forwarder.New(forwarder.Config{
//		Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.AllTopics()),
//		Destinations: []forwarder.Destination{{
//			Publisher: nats, DeduplicationKey: forwarder.NATSMessageID,
//		}},
//	}, logger)
//	…
//	return f.Run(ctx)
//
// # What it promises
//
//   - Every message reaches every destination that it is routed to, at least once,
//     or becomes a dead letter of that destination that says why.
//   - Messages of one topic and ordering key, a line, arrive in order. Lines go in
//     parallel, which is where the speed comes from: the publishers of brokers send
//     a message and wait.
//   - UUID, metadata and payload arrive as they were published.
//   - A destination that is slow or dead delays only itself. Each has a consumer
//     group of its own, so its progress is stored by itself.
//   - What is in memory is bounded: Destination.MaxInFlight lines with
//     Config.BatchSize messages each, beside what the subscription has read.
//
// # One message
//
// A message goes through the middlewares, the route, and the template of the topic,
// once for each delivery; then it is published, as often as it takes, and acked
// when the publisher has returned nil for all that became of it. What was published
// of it is not published again, unless the process ends in between; a
// Destination.DeduplicationKey lets the broker see that. The next of its line is
// published after that. A message whose context has ended, because the lease is
// another process's, is never published.
//
// # Whose fault a failure is
//
// If a broker is down for an hour, no message may be given up; if a message can never
// pass, it must not hold up its line for ever. Both look the same, an error of
// Publish, so everything rests on telling them apart. A failure is
//
//   - the destination's, if its type says so (see Classify);
//   - the message's, for good, if the error is outbox.Permanent, or there is no way
//     to publish it: its envelope cannot be read, its route leads nowhere;
//   - the message's, if a middleware failed, or Destination.Classify says so;
//   - otherwise unknown, and then the message's only if the destination is seen to
//     work: it took another message since this one failed the time before, or
//     Destination.Ping says that it is up.
//
// The first failure of a message proves nothing, since what the destination took
// before may have been its last. Each further one counts if there was a success in
// between: it shows that the destination came back, or never was away, and the
// message failed all the same.
//
// A failure of the message's own is an attempt: it is left to the subscription
// (Nack, with the error), which counts it durably and hands the message out again
// after a pause, its line waiting. When Config.MaxAttempts are spent it becomes a
// dead letter, or goes to Destination.PoisonTopic.
//
// All others are held against the destination. The message stays where it is,
// un-acked, and no attempt is spent. After Destination.Failures in a row its breaker
// opens: nobody publishes, until after a pause, which doubles each time, one message
// tries. The waiting lines take turns at that, for the message that tries may be what
// fails: the first line that is healthy closes the breaker, and proves the fault of
// the others. A turn ends after twice the Destination.PublishTimeout, since the
// publisher may hang, which nothing can end: the call keeps its goroutine and its
// line, and no others.
//
// One case remains: messages with unknown errors are all there is, and nothing else
// can show that the destination is up. One that has failed MaxAttempts times without
// proof is a suspect, and
//
//   - when it has failed again, as the one that tries, the message behind it in its
//     line is tried at once. If that is accepted, the first was to blame, and becomes a
//     dead letter: its line has gone on without it. If not, nothing is known still.
//     Only a failure that took less than a second is tested so: a longer one may have
//     begun when the destination was still down;
//   - it makes room: the source has it back, uncounted, and hands it out again with
//     what stands behind it by then. Others get its place, who may be the proof.
//
// So a message that would have passed the next time is a dead letter only if it
// failed by itself right when an outage ended, or if the outage ended between its
// failure and the message behind it, within that second. And a message with nothing
// behind it, nor beside it, waits: nobody is harmed by that, and Status shows it. So do
// two such in a row of a line that is all there is; there Destination.Ping or
// Destination.Classify help, which are better witnesses in any case.
//
// # The end
//
// The subscriptions end first, so that nothing that is left counts as failed. Then
// the pumps begin nothing more; what is being published has Config.CloseTimeout, and
// is acked if it gets through. Everything else is handed out again by whoever runs
// next.
package forwarder
