package replication

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCreatePublicationCommand(t *testing.T) {
	t.Parallel()
	tables := []Table{{"s", "t"}, {`Odd "s"`, "T'x"}}
	for _, test := range []struct {
		publication Publication
		want        string
		err         string
	}{
		{Publication{Name: "p", Tables: tables, Insert: true, ViaRoot: true}, `CREATE PUBLICATION "p" FOR TABLE "s"."t", "Odd ""s"""."T'x" WITH (publish = 'insert', publish_via_partition_root = true)`, ""},
		{Publication{Name: `"p`, AllTables: true, Insert: true, Update: true, Delete: true, Truncate: true}, `CREATE PUBLICATION """p" FOR ALL TABLES WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = false)`, ""},
		{Publication{Name: "p", Tables: tables}, "", "publishes nothing"},
		{Publication{Name: "p", Insert: true}, "", "has no tables"},
		{Publication{Name: "p", Insert: true, AllTables: true, Tables: tables}, "", "none may be named"},
		{Publication{Insert: true, Tables: tables}, "", "invalid name"},
		{Publication{Name: "p", Insert: true, Tables: []Table{{"", "t"}}}, "", "invalid name: schema"},
		{Publication{Name: "p", Insert: true, Tables: []Table{{"s", strings.Repeat("x", 64)}}}, "", "invalid name: table"},
	} {
		got, err := test.publication.createCommand()
		if test.err != "" {
			require.ErrorContains(t, err, test.err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, test.want, got)
	}
}
