package brokertest

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// echo is a server that says each line back, until the test ends. It returns its
// address and what it has heard.
func echo(t *testing.T) (addr string, heard <-chan string) {
	t.Helper()
	listener, err := Listen(t.Context())
	require.NoError(t, err)
	lines := make(chan string, 100)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			// Ends when the proxy hangs up.
			go func() {
				defer conn.Close()
				reader := bufio.NewReader(conn)
				for {
					line, err := reader.ReadString('\n')
					if err != nil {
						return
					}
					lines <- line
					if _, err := io.WriteString(conn, line); err != nil {
						return
					}
				}
			}()
		}
	}()
	t.Cleanup(func() {
		require.NoError(t, listener.Close())
		<-done
	})
	return listener.Addr().String(), lines
}

func newProxy(t *testing.T, target string) *Proxy {
	t.Helper()
	p, err := NewProxy(target)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

func dialTest(t *testing.T, addr string) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn, bufio.NewReader(conn)
}

// say writes a line and returns what comes back.
func say(t *testing.T, conn net.Conn, reader *bufio.Reader, line string) (string, error) {
	t.Helper()
	_, err := io.WriteString(conn, line+"\n")
	require.NoError(t, err)
	return reader.ReadString('\n')
}

func TestProxyForwards(t *testing.T) {
	t.Parallel()
	addr, heard := echo(t)
	p := newProxy(t, addr)
	conn, reader := dialTest(t, p.Addr())
	answer, err := say(t, conn, reader, "one")
	require.NoError(t, err)
	require.Equal(t, "one\n", answer)
	require.Equal(t, "one\n", <-heard)
	require.Equal(t, 1, p.Conns())

	p.CutAll()
	_, err = reader.ReadByte()
	require.ErrorIs(t, err, syscall.ECONNRESET)
	conn, reader = dialTest(t, p.Addr())
	_, err = say(t, conn, reader, "two")
	require.NoError(t, err)
}

func TestProxyRefuses(t *testing.T) {
	t.Parallel()
	addr, _ := echo(t)
	p := newProxy(t, addr)
	old, reader := dialTest(t, p.Addr())
	_, err := say(t, old, reader, "here") // so that the proxy has it, and not only the system
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, p.RefuseNew(true))
	}
	_, err = new(net.Dialer).DialContext(t.Context(), "tcp", p.Addr())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	_, err = say(t, old, reader, "still here")
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, p.RefuseNew(false))
	}
	conn, reader := dialTest(t, p.Addr())
	_, err = say(t, conn, reader, "again")
	require.NoError(t, err)
}

func TestProxyPauses(t *testing.T) {
	t.Parallel()
	addr, heard := echo(t)
	p := newProxy(t, addr)
	conn, reader := dialTest(t, p.Addr())
	_, err := say(t, conn, reader, "before")
	require.NoError(t, err)
	require.Equal(t, "before\n", <-heard)
	passed := make(chan struct{})
	p.Pause()
	p.Pause()
	p.OnClient(func([]byte) Action { close(passed); return Forward })
	_, err = io.WriteString(conn, "held back\n")
	require.NoError(t, err)
	<-passed // the proxy has it
	require.Empty(t, heard)
	p.Resume()
	p.Resume()
	require.Equal(t, "held back\n", <-heard)
	_, err = reader.ReadString('\n')
	require.NoError(t, err)
}

func TestProxyMidMessage(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		action Action
		heard  bool
	}{"cut before": {Cut, false}, "reply lost": {LoseReply, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr, heard := echo(t)
			p := newProxy(t, addr)
			p.OnClient(func(data []byte) Action {
				if bytes.Contains(data, []byte("fatal")) {
					return test.action
				}
				return Forward
			})
			conn, reader := dialTest(t, p.Addr())
			_, err := say(t, conn, reader, "fine")
			require.NoError(t, err)
			require.Equal(t, "fine\n", <-heard)
			_, err = say(t, conn, reader, "fatal")
			require.ErrorIs(t, err, syscall.ECONNRESET)
			if test.heard {
				require.Equal(t, "fatal\n", <-heard)
			}
			require.Empty(t, heard)
		})
	}
}

// A client of Kafka dials the addresses that the cluster tells.
func TestProxyDial(t *testing.T) {
	t.Parallel()
	addr, _ := echo(t)
	other, heard := echo(t)
	p := newProxy(t, addr)
	conn, err := p.Dial("tcp", other)
	require.NoError(t, err)
	defer conn.Close()
	_, err = say(t, conn, bufio.NewReader(conn), "to the other")
	require.NoError(t, err)
	require.Equal(t, "to the other\n", <-heard)
	require.Equal(t, 1, p.Conns())
}

// A server that is away, and one that hangs up.
func TestProxyServerGone(t *testing.T) {
	t.Parallel()
	listener, err := Listen(t.Context())
	require.NoError(t, err)
	p := newProxy(t, listener.Addr().String())
	_, reader := dialTest(t, p.Addr())
	server, err := listener.Accept()
	require.NoError(t, err)
	_, err = io.WriteString(server, "bye")
	require.NoError(t, err)
	require.NoError(t, server.Close())
	text, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "bye", string(text))

	require.NoError(t, listener.Close())
	// The proxy resets what it has accepted, which the dial itself may notice.
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", p.Addr())
	if err == nil {
		defer conn.Close()
		_, err = conn.Read(make([]byte, 1))
	}
	require.ErrorIs(t, err, syscall.ECONNRESET)
}

func TestFreePorts(t *testing.T) {
	t.Parallel()
	ports, err := FreePorts(t.Context(), 20)
	require.NoError(t, err)
	seen := map[int]bool{}
	for _, port := range ports {
		require.False(t, seen[port])
		seen[port] = true
		require.GreaterOrEqual(t, port, firstPort)
		require.Less(t, port, lastPort)
	}
}

func TestProgram(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/nowhere-server", nil, 0o700))
	path, err := Program("nowhere-server", "nowhere", "NOWHERE_URL", "/nonexistent/*", dir+"/nowhere-*")
	require.NoError(t, err)
	require.Equal(t, dir+"/nowhere-server", path)
	_, err = Program("nowhere-server", "nowhere", "NOWHERE_URL")
	require.ErrorContains(t, err, "there is no nowhere-server: install it (apt-get install nowhere), or name a server in NOWHERE_URL")
}
