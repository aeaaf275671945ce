// Command bench measures the outbox against bare pgx on the same PostgreSQL,
// table and rows, and compares the result with what the library requires of
// itself:
//
//	go run ./bench [flags] SCENARIO...
//
// Without a scenario it lists them; -h explains the flags. The server is a
// throw-away one, or the one named by OUTBOX_DATABASE_URL; a scenario works in
// databases of its own and drops them.
//
// A figure is the median over rounds in which the baseline and the outbox take
// turns, and its ratio is the median of the ratios within a round, so a machine
// that is slow for a while is slow for both. Absolute values say something
// about the machine, ratios about the library.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"text/tabwriter"
)

// minRounds is what a median needs to ignore one bad round.
const minRounds = 3

// A scenario measures one thing, in rounds, and adds its figures.
type scenario struct {
	name  string
	about string
	// durable keeps fsync on: commits cost what they cost in production.
	durable bool
	run     func(context.Context, *bench) error
}

var scenarios = []scenario{
	{"publish", "messages published per second, singly on 1, 8 and 16 connections, and 100 and 100,000 per call", true, publishScenario},
	{"copy", "where COPY begins to pay against one INSERT of arrays", true, copyScenario},
	{"drain", "messages drained per second from a backlog, with an Ack each", false, drainScenario},
	{"memory", "peak memory while draining many small and some large messages", false, memoryScenario},
	{"growth", "time of a page when 100,000 and when 5,000,000 delivered rows are stored", false, growthScenario},
	{"partitions", "time of a page and of an idle look with 10 and with 500 partitions stored", false, partitionsScenario},
	{"latency", "time from the publishing commit to the handler at 500 messages a second", true, latencyScenario},
	{"live", "messages received per second while they are published, against a bare reader of the WAL", false, liveScenario},
	{"bykey", "messages handled per second by slow handlers, keys in parallel", false, byKeyScenario},
	{"unordered", "the same without an order", false, unorderedScenario},
	{"poison", "what other keys still do while one message is always nacked", false, poisonScenario},
	{"forward", "messages forwarded per second to JetStream, against Watermill's own Forwarder and against publishing directly", false, forwardScenario},
	{"soak", "half an hour at 2,000 messages a second with partitions of a minute: what is lost, grows, or makes writers wait", true, soakScenario},
	{"spare", "a million rows in the DEFAULT partition when upkeep begins: how long it takes, and who waits for it", true, spareScenario},
	{"idle", "statements and CPU of an idle process with 1 and with 50 topics", false, idleScenario},
}

// options are the flags.
type options struct {
	json    bool
	check   bool
	rounds  int
	scale   float64
	backlog int
	profile string
}

// count scales a number of rows.
func (o options) count(n int) int { return max(int(float64(n)*o.scale), 1) }

func main() {
	if isChild() {
		os.Exit(childMain(os.Stdout, os.Stderr))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	code := run(ctx, scenarios, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program with the given scenarios. It returns 0, 1 if a scenario failed or -check found a
// requirement missed, and 2 if the command line makes no sense.
func run(ctx context.Context, scenarios []scenario, args []string, stdout, stderr io.Writer) int {
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.BoolVar(&o.json, "json", false, "print one JSON object per figure instead of a table")
	flags.BoolVar(&o.check, "check", false, "exit with 1 when a requirement is missed")
	flags.IntVar(&o.rounds, "rounds", minRounds, "turns of each contender; -check wants at least 3")
	flags.Float64Var(&o.scale, "scale", 1, "multiply numbers of rows and durations, for quick tries; requirements hold at 1")
	flags.IntVar(&o.backlog, "n", 0, "messages in the backlog of drain, instead of 500,000 times the scale")
	flags.StringVar(&o.profile, "profile", "", "write a CPU profile of each turn into this `folder`")
	flags.Usage = func() {
		fmt.Fprintf(stderr, "Usage: bench [flags] SCENARIO...\n\nScenarios (\"all\" runs them all):\n")
		listScenarios(stderr, scenarios)
		fmt.Fprintf(stderr, "\nFlags:\n")
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return 2
	}
	chosen, err := choose(scenarios, flags.Args())
	switch {
	case err != nil:
	case o.rounds < 1 || o.check && o.rounds < minRounds:
		err = fmt.Errorf("-rounds must be at least 1, and %d with -check, is %d", minRounds, o.rounds)
	case o.scale <= 0:
		err = fmt.Errorf("-scale must be above 0, is %v", o.scale)
	case o.backlog < 0:
		err = fmt.Errorf("-n must not be negative, is %d", o.backlog)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 2
	}
	if len(chosen) == 0 {
		listScenarios(stdout, scenarios)
		return 0
	}

	figures, err := runAll(ctx, o, chosen, stdout, stderr)
	if !o.json {
		printTable(stdout, figures)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	if missed := missed(figures); o.check && len(missed) > 0 {
		for _, f := range missed {
			fmt.Fprintf(stderr, "bench: missed: %s, %s: %s\n", f.Scenario, f.Metric, cmp.Or(f.Invalid, f.Required.String()))
		}
		return 1
	}
	return 0
}

func choose(scenarios []scenario, names []string) ([]scenario, error) {
	if slices.Equal(names, []string{"all"}) {
		return scenarios, nil
	}
	var chosen []scenario
	for _, name := range names {
		i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == name })
		if i < 0 {
			return nil, fmt.Errorf("no scenario %q; without arguments bench lists them", name)
		}
		chosen = append(chosen, scenarios[i])
	}
	return chosen, nil
}

func listScenarios(w io.Writer, scenarios []scenario) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, s := range scenarios {
		fmt.Fprintf(t, "  %s\t%s\n", s.name, s.about)
	}
	_ = t.Flush()
}
