package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	outbox "github.com/millrace/watermill-outbox"
)

// envChild makes the program a child: one measurement in a process of its own,
// so that nothing else is in its memory and its CPU time. It holds a task.
const envChild = "OUTBOX_BENCH_CHILD"

// task is what a child does.
type task struct {
	Name  string
	URL   string
	Mode  outbox.Mode
	Topic string
	N     int
	// Page is the rows of a bare page.
	Page int
	// Payload is the SQL of those that are written meanwhile.
	Payload string
	// Settle is how many seconds to leave the process alone before it is
	// measured, Seconds how long to watch.
	Settle, Seconds float64
}

// tasks by name; each returns its measurements by name.
var tasks = map[string]func(context.Context, task) (map[string]float64, error){
	"memory of bare":   memoryOfBare,
	"memory of outbox": memoryOfOutbox,
	"memory of live":   memoryOfLive,
	"idle bare":        idleBare,
	"idle outbox":      idleOutbox,
}

// settle waits until what the process has begun is at rest.
func (t task) settle() { time.Sleep(time.Duration(t.Settle * float64(time.Second))) }

func isChild() bool { return os.Getenv(envChild) != "" }

// childMain does the task and prints what it measured.
func childMain(stdout, stderr io.Writer) int {
	err := func() error {
		var t task
		if err := json.Unmarshal([]byte(os.Getenv(envChild)), &t); err != nil {
			return err
		}
		do, ok := tasks[t.Name]
		if !ok {
			return fmt.Errorf("no task %q", t.Name)
		}
		measured, err := do(context.Background(), t)
		if err != nil {
			return err
		}
		return json.NewEncoder(stdout).Encode(measured)
	}()
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	return 0
}

// inChild does a task in another process; the end of the context kills it.
func inChild(ctx context.Context, t task) (map[string]float64, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = append(os.Environ(), envChild+"="+string(text))
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", t.Name, err, bytes.TrimSpace(stderr.Bytes()))
	}
	var measured map[string]float64
	if err := json.Unmarshal(output, &measured); err != nil {
		return nil, fmt.Errorf("%s: %w", t.Name, err)
	}
	return measured, nil
}
