package tests

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Environment of a child process: the test binary, run again as a consumer that
// can be killed.
const (
	childURL   = "OUTBOX_TEST_CHILD_URL"
	childTopic = "OUTBOX_TEST_CHILD_TOPIC"
	childLease = "OUTBOX_TEST_CHILD_LEASE"
	// childShards is the number of shards; then each line begins with the time.
	childShards = "OUTBOX_TEST_CHILD_SHARDS"

	// childRestart is the address of a test that restarts its server when asked.
	childRestart = "OUTBOX_TEST_CHILD_RESTART"
)

// childCheckpoint is how often a child stores its position.
const childCheckpoint = 100 * time.Millisecond

// consumeAsChild receives until it is killed, or its standard input ends: then
// it closes cleanly. Each message is reported on standard output before it is
// acked, unbuffered, so that what is acked was reported.
func consumeAsChild() error {
	db, err := pgxpool.ParseConfig(os.Getenv(childURL))
	if err != nil {
		return err
	}
	lease, err := time.ParseDuration(os.Getenv(childLease))
	if err != nil {
		return err
	}
	consumer, err := outbox.NewConsumer(db, outbox.ConsumerConfig{
		Schema: oddSchema, PollInterval: 5 * time.Millisecond, CheckpointInterval: childCheckpoint, Lease: lease,
		Mode: testMode,
	}, testLogger(nil))
	if err != nil {
		return err
	}
	shards, _ := strconv.Atoi(os.Getenv(childShards))
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{PageSize: 7, Shards: shards}, nil)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadByte()
		cancel()
	}()
	messages, err := subscriber.Subscribe(ctx, os.Getenv(childTopic))
	if err != nil {
		return err
	}
	for msg := range messages {
		line := append(msg.Payload, '\n')
		if shards > 0 {
			line = append([]byte(strconv.FormatInt(time.Now().UnixNano(), 10)+" "), line...)
		}
		if _, err := os.Stdout.Write(line); err != nil {
			return err
		}
		msg.Ack()
	}
	return consumer.Close()
}

// child is a running child process.
type child struct {
	t       *testing.T
	command *exec.Cmd
	stdin   interface{ Close() error }
	lines   chan string // closed at its end
}

func (f *fixture) startChild(t *testing.T, topic string, lease time.Duration, environment ...string) *child {
	t.Helper()
	command := exec.Command(os.Args[0]) //nolint:noctx // killed by the test
	command.Env = append(os.Environ(), childURL+"="+f.url, childTopic+"="+topic, childLease+"="+lease.String())
	command.Env = append(command.Env, environment...)
	command.Stderr = os.Stderr
	stdin, err := command.StdinPipe()
	require.NoError(t, err)
	stdout, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	c := &child{t: t, command: command, stdin: stdin, lines: make(chan string, 10_000)}
	go func() {
		defer close(c.lines)
		scanner := bufio.NewScanner(stdout)
		for scanner.Scan() {
			c.lines <- scanner.Text()
		}
	}()
	return c
}

// kill ends the process with SIGKILL. What it reported can still be read.
func (c *child) kill() {
	require.NoError(c.t, c.command.Process.Kill())
}

// suspend stops the process with SIGSTOP, and returns when it stands still: a
// thread of it learns of the signal when it gets a processor, and until then the
// others go on.
func (c *child) suspend() {
	c.t.Helper()
	require.NoError(c.t, c.command.Process.Signal(syscall.SIGSTOP))
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(c.command.Process.Pid, &status, syscall.WUNTRACED, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		require.NoError(c.t, err)
		require.True(c.t, status.Stopped(), "it ended instead: %v", status)
		return
	}
}

// resume lets a process go on.
func (c *child) resume() {
	c.t.Helper()
	require.NoError(c.t, c.command.Process.Signal(syscall.SIGCONT))
}

// stop ends the process cleanly.
func (c *child) stop() {
	require.NoError(c.t, c.stdin.Close())
}

// wait is called when lines is closed.
func (c *child) wait() error { return c.command.Wait() }
