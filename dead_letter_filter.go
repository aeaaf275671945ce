package outbox

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

const (
	// DefaultDeadLetterPage is how many entries a page has at most unless its
	// Limit says otherwise.
	DefaultDeadLetterPage = 100
	// LimitDeadLetterPage is the most that Limit may be.
	LimitDeadLetterPage = 1000
	// MaxReasonBytes bounds a reason, which goes into the audit trail.
	MaxReasonBytes = 4096
	// maxErrorContainsBytes bounds what errors are searched for.
	maxErrorContainsBytes = 4096
)

// DeadLetterFilter chooses dead letters: those that meet each condition that is
// set. The zero value chooses all; where they would be changed, All has to say
// that this is meant.
type DeadLetterFilter struct {
	// IDs are those of the dead letters. An empty list that is not nil chooses
	// none.
	IDs []int64
	// ConsumerGroup, Topic, OrderingKey and UUID must be equal. An index serves
	// the group, better with the topic; the others are looked for in what that
	// leaves.
	ConsumerGroup string
	Topic         string
	OrderingKey   string
	UUID          string
	// ErrorContains is a part of the error, case included.
	ErrorContains string
	// DiedFrom and DiedBefore bound the time of death, by the database's clock.
	DiedFrom   time.Time
	DiedBefore time.Time
	// All allows RequeueAll and DiscardAll to be called without a condition. It
	// may not stand beside one.
	All bool
}

// DeadLetterPage is a part of a list, by ascending id.
type DeadLetterPage struct {
	// After is the id of the last entry of the page before. 0 begins.
	After int64
	// Limit is how many entries the page has at most, up to
	// LimitDeadLetterPage. Defaults to DefaultDeadLetterPage.
	Limit int
}

func (p DeadLetterPage) validate() error {
	switch {
	case p.After < 0:
		return fmt.Errorf("outbox: DeadLetterPage.After must not be negative, is %d", p.After)
	case p.Limit < 0 || p.Limit > LimitDeadLetterPage:
		return fmt.Errorf("outbox: DeadLetterPage.Limit must be between 0 and %d, is %d", LimitDeadLetterPage, p.Limit)
	}
	return nil
}

// DeadLetterEventFilter chooses entries of the audit trail: those that meet each
// condition that is set.
type DeadLetterEventFilter struct {
	DeadLetterID  int64
	ConsumerGroup string
	Topic         string
	UUID          string
	Action        DeadLetterAction
	// From and Before bound the time, by the database's clock.
	From   time.Time
	Before time.Time
}

// conditions are those of a statement, with the values of its parameters. Only
// those that are set are in the text: for one that allows anything the planner
// could not use an index.
type conditions struct {
	list []string
	args []any
}

// arg adds a value and returns its parameter.
func (c *conditions) arg(value any) string {
	c.args = append(c.args, value)
	return "$" + strconv.Itoa(len(c.args))
}

// add adds a condition, in which the parameter of the value takes the place of
// the question mark.
func (c *conditions) add(text string, value any) {
	c.list = append(c.list, strings.Replace(text, "?", c.arg(value), 1))
}

func (c *conditions) addText(text, value string) {
	if value != "" {
		c.add(text, value)
	}
}

func (c *conditions) addTime(text string, value time.Time) {
	if !value.IsZero() {
		c.add(text, value)
	}
}

// String is what stands after WHERE.
func (c *conditions) String() string {
	if len(c.list) == 0 {
		return "true"
	}
	return strings.Join(c.list, " AND ")
}

// conditions checks the filter and returns it as conditions on d.
func (f DeadLetterFilter) conditions() (*conditions, error) {
	for _, field := range []struct {
		name, value string
		limit       int
	}{
		{"ConsumerGroup", f.ConsumerGroup, MaxConsumerGroupBytes},
		{"Topic", f.Topic, MaxTopicBytes},
		{"OrderingKey", f.OrderingKey, MaxOrderingKeyBytes},
		{"UUID", f.UUID, MaxUUIDBytes},
		{"ErrorContains", f.ErrorContains, maxErrorContainsBytes},
	} {
		if problem := textProblem(field.value, field.limit); problem != "" {
			return nil, fmt.Errorf("outbox: DeadLetterFilter.%s %s", field.name, problem)
		}
	}
	if !f.DiedFrom.IsZero() && !f.DiedBefore.IsZero() && !f.DiedFrom.Before(f.DiedBefore) {
		return nil, errors.New("outbox: DeadLetterFilter.DiedFrom must be before DiedBefore")
	}
	c := new(conditions)
	if f.IDs != nil {
		c.add("d.id = ANY (?::text::bigint[])", idArray(f.IDs))
	}
	c.addText("d.consumer_group = ?::text", f.ConsumerGroup)
	c.addText("d.topic = ?::text", f.Topic)
	c.addText("d.key = ?::text", f.OrderingKey)
	c.addText("d.uuid = ?::text", f.UUID)
	c.addText("strpos(d.error, ?::text) > 0", f.ErrorContains)
	c.addTime("d.died_at >= ?::timestamptz", f.DiedFrom)
	c.addTime("d.died_at < ?::timestamptz", f.DiedBefore)
	if f.All && len(c.list) > 0 {
		return nil, errors.New("outbox: DeadLetterFilter.All is set beside a condition: leave one of them out")
	}
	return c, nil
}

// change is conditions for what changes dead letters: it must be clear which.
func (f DeadLetterFilter) change() (*conditions, error) {
	c, err := f.conditions()
	if err == nil && len(c.list) == 0 && !f.All {
		return nil, errors.New("outbox: DeadLetterFilter has no condition: set DeadLetterFilter.All if all dead letters are meant")
	}
	return c, err
}

// conditions checks the filter and returns it as conditions on l.
func (f DeadLetterEventFilter) conditions() (*conditions, error) {
	for _, field := range []struct {
		name, value string
		limit       int
	}{
		{"ConsumerGroup", f.ConsumerGroup, MaxConsumerGroupBytes},
		{"Topic", f.Topic, MaxTopicBytes},
		{"UUID", f.UUID, MaxUUIDBytes},
	} {
		if problem := textProblem(field.value, field.limit); problem != "" {
			return nil, fmt.Errorf("outbox: DeadLetterEventFilter.%s %s", field.name, problem)
		}
	}
	switch f.Action {
	case "", DeadLetterDied, DeadLetterRequeued, DeadLetterDiscarded:
	default:
		return nil, fmt.Errorf("outbox: DeadLetterEventFilter.Action %.100q is none of the actions", f.Action)
	}
	if f.DeadLetterID < 0 {
		return nil, fmt.Errorf("outbox: DeadLetterEventFilter.DeadLetterID must not be negative, is %d", f.DeadLetterID)
	}
	if !f.From.IsZero() && !f.Before.IsZero() && !f.From.Before(f.Before) {
		return nil, errors.New("outbox: DeadLetterEventFilter.From must be before Before")
	}
	c := new(conditions)
	if f.DeadLetterID != 0 {
		c.add("l.dead_letter_id = ?::bigint", f.DeadLetterID)
	}
	c.addText("l.consumer_group = ?::text", f.ConsumerGroup)
	c.addText("l.topic = ?::text", f.Topic)
	c.addText("l.uuid = ?::text", f.UUID)
	c.addText("l.action = ?::text", string(f.Action))
	c.addTime("l.at >= ?::timestamptz", f.From)
	c.addTime("l.at < ?::timestamptz", f.Before)
	return c, nil
}

// idArray is the text form of an array of ids: drivers agree on no array type.
func idArray(ids []int64) string {
	text := []byte{'{'}
	for i, id := range ids {
		if i > 0 {
			text = append(text, ',')
		}
		text = strconv.AppendInt(text, id, 10)
	}
	return string(append(text, '}'))
}
