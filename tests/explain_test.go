package tests

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// plan is a node of what EXPLAIN (FORMAT JSON) answers.
type plan struct {
	Type      string  `json:"Node Type"`
	Subplan   string  `json:"Subplan Name"`
	Relation  string  `json:"Relation Name"`
	Index     string  `json:"Index Name"`
	IndexCond string  `json:"Index Cond"`
	Rows      float64 `json:"Actual Rows"`
	Loops     float64 `json:"Actual Loops"`
	Removed   float64 `json:"Rows Removed by Filter"`
	Plans     []plan  `json:"Plans"`
}

// explain returns the plan of a statement that the session has prepared, with
// these options and values.
func explain(t testing.TB, conn *pgx.Conn, options, name string, values []string) plan {
	t.Helper()
	statement := fmt.Sprintf("EXPLAIN (FORMAT JSON%s) EXECUTE %s", options, name)
	if len(values) > 0 {
		statement += "(" + strings.Join(values, ", ") + ")"
	}
	// The simple protocol, since what is explained is prepared already.
	var text string
	require.NoError(t, conn.QueryRow(t.Context(), statement, pgx.QueryExecModeSimpleProtocol).Scan(&text))
	var answer []struct {
		Plan plan `json:"Plan"`
	}
	require.NoError(t, json.Unmarshal([]byte(text), &answer))
	require.Len(t, answer, 1)
	return answer[0].Plan
}

// String returns the plan as EXPLAIN's text, shortened.
func (p plan) String() string {
	var b strings.Builder
	p.walk(func(node plan, above []plan) {
		fmt.Fprintf(&b, "%s%s", strings.Repeat("  ", len(above)), node.Type)
		for _, part := range []string{node.Subplan, node.Relation, node.Index, node.IndexCond} {
			if part != "" {
				b.WriteString(" | " + part)
			}
		}
		b.WriteByte('\n')
	})
	return b.String()
}

// walk calls visit for each node, with the nodes above it.
func (p plan) walk(visit func(node plan, above []plan)) { p.walkUnder(nil, visit) }

func (p plan) walkUnder(above []plan, visit func(node plan, above []plan)) {
	visit(p, above)
	for _, child := range p.Plans {
		child.walkUnder(append(above[:len(above):len(above)], p), visit)
	}
}

// onMessages reports whether a node reads a partition of messages.
func (p plan) onMessages() bool {
	return strings.HasPrefix(p.Relation, "messages_") && p.Relation != "messages_id_seq"
}
