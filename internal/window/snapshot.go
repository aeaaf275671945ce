package window

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Snapshot is a PostgreSQL snapshot (pg_snapshot): which transactions had
// committed when it was taken. The zero value sees nothing.
type Snapshot struct {
	// xmin: every transaction below has ended.
	// xmax: no transaction at or above has ended; one more than the latest
	// completed one, not the next to be issued.
	xmin, xmax uint64
	// xip are the transactions in between that had not ended, ascending.
	xip []uint64
}

// ParseSnapshot reads the text form, xmin:xmax:xip,xip,….
func ParseSnapshot(text string) (Snapshot, error) {
	fail := func() (Snapshot, error) {
		return Snapshot{}, fmt.Errorf("not a snapshot: %.200q", text)
	}
	first, rest, ok := strings.Cut(text, ":")
	second, list, ok2 := strings.Cut(rest, ":")
	if !ok || !ok2 {
		return fail()
	}
	xmin, err := strconv.ParseUint(first, 10, 64)
	if err != nil {
		return fail()
	}
	xmax, err := strconv.ParseUint(second, 10, 64)
	if err != nil || xmin == 0 || xmax < xmin {
		return fail()
	}
	if xmax == 1 && list == "" {
		return Snapshot{}, nil // sees nothing, as the zero value
	}
	s := Snapshot{xmin: xmin, xmax: xmax}
	if list == "" {
		return s, nil
	}
	s.xip = make([]uint64, 0, strings.Count(list, ",")+1)
	for item := range strings.SplitSeq(list, ",") {
		x, err := strconv.ParseUint(item, 10, 64)
		if err != nil || x < xmin || x >= xmax || (len(s.xip) > 0 && x <= s.xip[len(s.xip)-1]) {
			return fail()
		}
		s.xip = append(s.xip, x)
	}
	return s, nil
}

// String returns the text form, which PostgreSQL reads.
func (s Snapshot) String() string {
	if s.xmax == 0 {
		return "1:1:"
	}
	b := make([]byte, 0, 64)
	b = strconv.AppendUint(b, s.xmin, 10)
	b = append(b, ':')
	b = strconv.AppendUint(b, s.xmax, 10)
	b = append(b, ':')
	for i, x := range s.xip {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, x, 10)
	}
	return string(b)
}

// Sees reports whether a transaction that committed is visible in s.
func (s Snapshot) Sees(xid uint64) bool {
	if xid < s.xmin {
		return true
	}
	if xid >= s.xmax {
		return false
	}
	_, running := slices.BinarySearch(s.xip, xid)
	return !running
}

// Covers reports whether s sees every transaction that other sees.
func (s Snapshot) Covers(other Snapshot) bool {
	// All in [s.xmax, other.xmax), which s does not see, must be running in
	// other; the loop ends at the first that is not.
	for x := max(s.xmax, 1); x < other.xmax; x++ { // 0 is no transaction
		if other.Sees(x) {
			return false
		}
	}
	for _, x := range s.xip {
		if other.Sees(x) {
			return false
		}
	}
	return true
}

// Equal reports whether both see the same.
func (s Snapshot) Equal(other Snapshot) bool {
	return s.xmin == other.xmin && s.xmax == other.xmax && slices.Equal(s.xip, other.xip)
}

// Xmax is one more than the latest transaction that had ended.
func (s Snapshot) Xmax() uint64 { return s.xmax }

// Xmin is the oldest transaction that was still running, or Xmax.
func (s Snapshot) Xmin() uint64 { return s.xmin }

// Empty reports whether s is the zero value.
func (s Snapshot) Empty() bool { return s.xmax <= 1 }
