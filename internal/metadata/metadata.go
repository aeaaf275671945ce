// Package metadata encodes and decodes the metadata column: a JSON object whose
// values are strings.
package metadata

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

const hex = "0123456789abcdef"

// Append appends m to dst as a JSON object. The caller has checked that keys
// and values are valid UTF-8; nothing else is changed, unlike with
// encoding/json, which also escapes HTML.
func Append(dst []byte, m map[string]string) []byte {
	dst = append(dst, '{')
	first := true
	for key, value := range m {
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = appendString(dst, key)
		dst = append(dst, ':')
		dst = appendString(dst, value)
	}
	return append(dst, '}')
}

// Storable returns a text of any bytes as one that can be a value: U+FFFD stands
// for what PostgreSQL cannot store.
func Storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

func appendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	start := 0
	for i := range len(s) {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, s[start:i]...)
		if c < ' ' {
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		} else {
			dst = append(dst, '\\', c)
		}
		start = i + 1
	}
	dst = append(dst, s[start:]...)
	return append(dst, '"')
}

// Decode returns the object in text as a map that is never nil. Text that is
// not an object of strings is an error: the row was written around the library.
func Decode(text []byte) (map[string]string, error) {
	if m, ok := decodePlain(text); ok {
		return m, nil
	}
	// Escapes, blanks, or not what it should be.
	var m map[string]*string
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, fmt.Errorf("metadata is not a JSON object of strings: %w", err)
	}
	if m == nil {
		return nil, fmt.Errorf("metadata is not a JSON object of strings: %.100q", text)
	}
	result := make(map[string]string, len(m))
	for key, value := range m {
		if value == nil {
			return nil, fmt.Errorf("metadata is not a JSON object of strings: the value of %q is null", key)
		}
		result[key] = *value
	}
	return result, nil
}

// decodePlain reads what Append writes for text without escapes, in one pass
// over one copy of the text; ok is false for everything else. Most metadata
// are such, and decoding them took a third of the time of a page.
func decodePlain(text []byte) (m map[string]string, ok bool) {
	if len(text) < 2 || text[0] != '{' || text[len(text)-1] != '}' {
		return nil, false
	}
	rest := string(text[1 : len(text)-1])
	if rest == "" {
		return map[string]string{}, true
	}
	if !utf8.ValidString(rest) { // encoding/json repairs it
		return nil, false
	}
	m = make(map[string]string, strings.Count(rest, `":"`))
	for {
		var key, value string
		if key, rest, ok = cutString(rest); !ok || rest == "" || rest[0] != ':' {
			return nil, false
		}
		if value, rest, ok = cutString(rest[1:]); !ok {
			return nil, false
		}
		m[key] = value
		if rest == "" {
			return m, true
		}
		if rest[0] != ',' {
			return nil, false
		}
		rest = rest[1:]
	}
}

// cutString cuts a quoted string without escapes from the front of s.
func cutString(s string) (text, rest string, ok bool) {
	if s == "" || s[0] != '"' {
		return "", "", false
	}
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			return s[1:i], s[i+1:], true
		case c == '\\' || c < ' ':
			return "", "", false
		}
	}
	return "", "", false
}
