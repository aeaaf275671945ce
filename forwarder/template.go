package forwarder

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

const metadataPlace = "metadata:"

// template makes a topic of a message: texts, and places between them.
type template struct {
	texts  []string // one more than places
	places []string // "topic", "key", or "metadata:NAME"
}

// parseTemplate reads a text with {topic}, {key} and {metadata:NAME} in it.
func parseTemplate(text string) (template, error) {
	var t template
	for rest := text; ; {
		before, after, open := strings.Cut(rest, "{")
		if strings.Contains(before, "}") {
			return template{}, fmt.Errorf("topic template %q: a } without a {", text)
		}
		t.texts = append(t.texts, before)
		if !open {
			return t, nil
		}
		place, behind, closed := strings.Cut(after, "}")
		name, isMetadata := strings.CutPrefix(place, metadataPlace)
		switch {
		case !closed:
			return template{}, fmt.Errorf("topic template %q: a { without a }", text)
		case place != "topic" && place != "key" && (!isMetadata || name == ""):
			return template{}, fmt.Errorf("topic template %q: {%s} is none of {topic}, {key} and {metadata:NAME}", text, place)
		}
		t.places = append(t.places, place)
		rest = behind
	}
}

// topic fills the template in. A place that stays empty leads to no topic, even
// if there is text around it.
func (t template) topic(topic, key string, metadata message.Metadata) (string, error) {
	if len(t.places) == 1 && t.places[0] == "topic" && t.texts[0] == "" && t.texts[1] == "" && topic != "" {
		return topic, nil // as most are; it was a topic already
	}
	var b strings.Builder
	for i, text := range t.texts {
		b.WriteString(text)
		if i == len(t.places) {
			break
		}
		value := ""
		switch place := t.places[i]; place {
		case "topic":
			value = topic
		case "key":
			value = key
		default:
			value = metadata.Get(strings.TrimPrefix(place, metadataPlace))
		}
		if value == "" {
			return "", fmt.Errorf("%w: the message has no %s", ErrInvalidTopic, t.places[i])
		}
		b.WriteString(value)
	}
	return b.String(), checkTopic(b.String())
}

func checkTopic(topic string) error {
	switch {
	case topic == "":
		return fmt.Errorf("%w: it is empty", ErrInvalidTopic)
	case !utf8.ValidString(topic) || strings.ContainsRune(topic, 0):
		return fmt.Errorf("%w: %.200q is not UTF-8 without NUL", ErrInvalidTopic, topic)
	}
	return nil
}
