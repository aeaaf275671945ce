package brokertest

import "github.com/ThreeDotsLabs/watermill"

// OrNop returns logger, or one that says nothing: not all publishers take nil.
func OrNop(logger watermill.LoggerAdapter) watermill.LoggerAdapter {
	if logger == nil {
		return watermill.NopLogger{}
	}
	return logger
}
