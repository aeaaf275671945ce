package window

import (
	"slices"
	"strings"
)

// Topics are what a reader reads: one topic, or all that match one of some
// patterns. The zero value is the topic "", which there is not.
type Topics struct {
	name     string
	patterns []Pattern
}

// Pattern matches topics: its pieces come in this order, the first at the
// beginning and the last at the end, and whatever between them.
type Pattern []string

// One returns the topic of that name.
func One(name string) Topics { return Topics{name: name} }

// Matching returns the topics that match one of the patterns. However these are
// written, what obviously selects the same is the same: several gaps in a row are
// one, no pattern is there twice, and one that matches everything stands alone.
func Matching(patterns ...Pattern) Topics {
	t := Topics{patterns: make([]Pattern, 0, len(patterns))}
	for _, p := range patterns {
		p = p.canonical()
		if slices.Equal(p, Pattern{"", ""}) {
			return Topics{patterns: []Pattern{p}}
		}
		t.patterns = append(t.patterns, p)
	}
	slices.SortFunc(t.patterns, slices.Compare)
	t.patterns = slices.CompactFunc(t.patterns, slices.Equal)
	return t
}

// canonical returns the pattern without empty pieces between the first and the
// last.
func (p Pattern) canonical() Pattern {
	c := make(Pattern, 0, len(p))
	for i, piece := range p {
		if piece != "" || i == 0 || i == len(p)-1 {
			c = append(c, piece)
		}
	}
	return c
}

// Single returns the topic's name if there is one, and whether there is.
func (t Topics) Single() (string, bool) { return t.name, t.patterns == nil }

// Key names what is read: a topic by its name, and others by what no topic's
// name can be.
func (t Topics) Key() string {
	if t.patterns == nil {
		return t.name
	}
	return "\x00" + strings.Join(t.Like(), "\x00")
}

// Like returns the patterns as those of SQL's LIKE, sorted; nil for a single
// topic.
func (t Topics) Like() []string {
	if t.patterns == nil {
		return nil
	}
	escape := strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`)
	likes := make([]string, 0, len(t.patterns))
	for _, p := range t.patterns {
		pieces := make([]string, len(p))
		for i, piece := range p {
			pieces[i] = escape.Replace(piece)
		}
		likes = append(likes, strings.Join(pieces, "%"))
	}
	slices.Sort(likes)
	return likes
}

// Match reports whether the topic is among them.
func (t Topics) Match(topic string) bool {
	if t.patterns == nil {
		return topic == t.name
	}
	return slices.ContainsFunc(t.patterns, func(p Pattern) bool { return p.match(topic) })
}

func (p Pattern) match(topic string) bool {
	last := len(p) - 1
	if last <= 0 {
		return last == 0 && topic == p[0]
	}
	rest, ok := strings.CutPrefix(topic, p[0])
	if !ok {
		return false
	}
	if rest, ok = strings.CutSuffix(rest, p[last]); !ok {
		return false
	}
	// The leftmost place for each leaves the most to the others.
	for _, piece := range p[1:last] {
		if _, rest, ok = strings.Cut(rest, piece); !ok {
			return false
		}
	}
	return true
}
