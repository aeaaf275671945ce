package main

import outbox "github.com/millrace/watermill-outbox"

// subscription returns how the program's only subscription stands.
func subscription(status outbox.Status) outbox.SubscriptionStatus {
	for _, s := range status.Subscriptions {
		if s.Topic == topic {
			return s
		}
	}
	return outbox.SubscriptionStatus{Source: outbox.SourceTable} // it has ended
}

// describe says where messages come from, and why not from the WAL.
func describe(status outbox.Status) string {
	switch {
	case subscription(status).Source == outbox.SourceWAL:
		return "live: messages come from the WAL"
	case status.Source == outbox.SourceWAL:
		return "polling: there is a stream, the subscription is about to attach to it"
	default:
		return "polling: " + status.Reason
	}
}
