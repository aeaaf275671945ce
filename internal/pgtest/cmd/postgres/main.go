// Command postgres runs a throw-away PostgreSQL for as long as it is needed.
//
//	go run ./cmd/postgres
//
// starts a server, prints its URL as OUTBOX_DATABASE_URL=postgres://..., and
// runs until it is interrupted or its standard input ends: a script keeps it by
// holding a pipe to it, and can't leave it behind.
//
//	go run ./cmd/postgres [flags] -- COMMAND ARGUMENT...
//
// starts a server, runs the command with OUTBOX_DATABASE_URL in its
// environment, and exits with its exit code.
//
//	go run ./cmd/postgres -version
//
// starts a server, says which version it is, and stops it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// killDelay is how long the command may take to end after an interrupt.
const killDelay = 10 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code, err := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "postgres:", err)
	}
	os.Exit(code)
}

// run is main without the process: it returns the exit code, and an error to
// print if the failure is not the command's own.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) (int, error) {
	var o pgtest.Options
	flags := flag.NewFlagSet("postgres", flag.ContinueOnError)
	flags.SetOutput(stderr)
	version := flags.Bool("version", false, "only say which version it is")
	flags.BoolVar(&o.Durable, "durable", false, "keep fsync on")
	flags.Func("set", "`name=value` of a server setting (may be repeated)", func(text string) error {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return errors.New("it should look like name=value")
		}
		if o.Settings == nil {
			o.Settings = map[string]string{}
		}
		o.Settings[name] = value
		return nil
	})
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0, nil
		}
		return 2, nil // printed by flags
	}

	server, err := pgtest.Start(ctx, o)
	if err != nil {
		return 1, err
	}
	code := 0
	switch {
	case *version:
		_, err = fmt.Fprintln(stdout, "PostgreSQL", server.Version())
	case flags.NArg() > 0:
		code, err = runCommand(ctx, flags.Args(), server.URL(), stdin, stdout, stderr)
	default:
		err = serve(ctx, server.URL(), stdin, stdout)
	}
	if err = errors.Join(err, server.Stop()); err != nil && code == 0 {
		code = 1
	}
	return code, err
}

// serve prints the URL and waits for the end of ctx or of stdin.
func serve(ctx context.Context, url string, stdin io.Reader, stdout io.Writer) error {
	if _, err := fmt.Fprintf(stdout, "%s=%s\n", pgtest.EnvDatabaseURL, url); err != nil {
		return fmt.Errorf("print the URL: %w", err)
	}
	ended := make(chan error, 1)
	// Ends with the process at the latest: a read of a terminal can't be
	// interrupted.
	go func() {
		_, err := io.Copy(io.Discard, stdin)
		ended <- err
	}()
	select {
	case <-ctx.Done():
		return nil
	case err := <-ended:
		if err != nil {
			return fmt.Errorf("read standard input: %w", err)
		}
		return nil
	}
}

// runCommand runs a command to its end and returns its exit code.
func runCommand(ctx context.Context, command []string, url string, stdin io.Reader, stdout, stderr io.Writer) (int, error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), pgtest.EnvDatabaseURL+"="+url)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	// A terminal interrupts the command by itself; anybody else only us.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = killDelay
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.Exited():
		return exit.ExitCode(), nil
	case errors.As(err, &exit):
		return 1, fmt.Errorf("%s: %w", command[0], exit)
	case err != nil:
		return 127, fmt.Errorf("run %s: %w", command[0], err)
	}
	return 0, nil
}
