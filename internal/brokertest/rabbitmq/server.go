package rabbitmq

import (
	"context"
	"fmt"
	"net/url"
	"strings"

	"github.com/millrace/watermill-outbox/internal/brokertest"
)

// scripts is where packages put the server's script itself. The one on Debian's PATH
// is another, which changes the user and takes no settings.
var scripts = []string{
	"/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server",
	"/opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server",
	"/usr/local/opt/rabbitmq/sbin/rabbitmq-server",
}

// maxPayload is how large a payload our servers take, in bytes. By default it is 128 MiB,
// or 16 in later versions.
const maxPayload = 1 << 20

// server is a RabbitMQ node with nothing in common with others on the machine: its
// own ports, name, cookie, folders and epmd.
type server struct {
	process *brokertest.Process
	url     *url.URL
}

// newServer prepares a server and does not start it.
func newServer(ctx context.Context) (*server, error) {
	script, err := brokertest.Program("rabbitmq-server", "rabbitmq-server", EnvURL, scripts...)
	if err != nil {
		return nil, err
	}
	epmd, err := brokertest.Program("epmd", "erlang-base", EnvURL)
	if err != nil {
		return nil, err
	}
	ports, err := brokertest.FreePorts(ctx, 3)
	if err != nil {
		return nil, err
	}
	process, err := brokertest.NewProcess(map[string]string{
		"enabled_plugins": "[].\n",
		"rabbitmq.conf":   fmt.Sprintf("listeners.tcp.1 = 127.0.0.1:%d\nmax_message_size = %d\n", ports[0], maxPayload),
		// The node would start one that outlives it.
		"helper.sh": fmt.Sprintf("exec %s -port %d -address 127.0.0.1\n", brokertest.Quote(epmd), ports[2]),
		"start.sh":  startScript(script, ports),
	})
	if err != nil {
		return nil, err
	}
	return &server{
		process: process,
		url:     &url.URL{Scheme: "amqp", User: url.UserPassword("guest", "guest"), Host: brokertest.Local(ports[0]), Path: "/"},
	}, nil
}

func startScript(script string, ports []int) string {
	var b strings.Builder
	for _, line := range []string{
		// The cookie is made in there.
		`export HOME="$PWD"`,
		`export RABBITMQ_BASE="$PWD" RABBITMQ_MNESIA_BASE="$PWD/mnesia" RABBITMQ_LOG_BASE="$PWD/logs" RABBITMQ_PID_FILE="$PWD/pid"`,
		`export RABBITMQ_CONFIG_FILE="$PWD/rabbitmq.conf" RABBITMQ_ENABLED_PLUGINS_FILE="$PWD/enabled_plugins"`,
		// Files that the machine's own server has, and this one must not read.
		`export RABBITMQ_CONF_ENV_FILE="$PWD/none" RABBITMQ_ADVANCED_CONFIG_FILE="$PWD/none.config"`,
		`export RABBITMQ_NODENAME=brokertest@localhost RABBITMQ_LOGS=-`,
		fmt.Sprintf("export ERL_EPMD_PORT=%d ERL_EPMD_ADDRESS=127.0.0.1 RABBITMQ_DIST_PORT=%d", ports[2], ports[1]),
		// Only then does the script exec Erlang, so that a kill hits it; and Erlang
		// must not read the end of its input as the wish to stop.
		"export RABBITMQ_ALLOW_INPUT=1",
		`export RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="-noinput -kernel inet_dist_use_interface {127,0,0,1}"`,
		"exec " + brokertest.Quote(script),
	} {
		b.WriteString(line + "\n")
	}
	return b.String()
}

// ping reports whether the server lets clients in.
func (s *server) ping(ctx context.Context) error {
	conn, err := dial(ctx, s.url)
	if err != nil {
		return err
	}
	return conn.Close()
}
