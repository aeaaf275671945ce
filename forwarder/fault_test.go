package forwarder

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// faults are errors and whose fault the default takes them for.
var faults = map[string]struct {
	err  error
	want Fault
}{
	"refused":        {errDown, FaultDestination},
	"wrapped":        {fmt.Errorf("publish: %w", errDown), FaultDestination},
	"joined":         {errors.Join(errOdd, io.EOF), FaultDestination},
	"cut off":        {io.ErrUnexpectedEOF, FaultDestination},
	"closed":         {net.ErrClosed, FaultDestination},
	"pipe":           {io.ErrClosedPipe, FaultDestination},
	"errno":          {syscall.EPIPE, FaultDestination},
	"name":           {&net.DNSError{Err: "no such host", IsNotFound: true}, FaultDestination},
	"deadline":       {context.DeadlineExceeded, FaultDestination},
	"I/O deadline":   {os.ErrDeadlineExceeded, FaultDestination},
	"permanent":      {outbox.Permanent(errDown), FaultPermanent},
	"anything":       {errOdd, FaultUnknown},
	"cancelled":      {context.Canceled, FaultUnknown},
	"a panic's":      {&PanicError{Value: "boom"}, FaultUnknown},
	"temporary":      {temporaryError(true), FaultDestination},
	"not temporary":  {temporaryError(false), FaultUnknown},
	"a route's":      {outbox.Permanent(&RouteError{Err: ErrUnknownDestination}), FaultPermanent},
	"nothing at all": {nil, FaultUnknown},

	// What net/http returns says nothing by itself: it is in what it wraps.
	"a url's connection":    {&url.Error{Op: "Post", URL: "http://x", Err: errDown}, FaultDestination},
	"a url's connection in": {&url.Error{Op: "Post", URL: "http://x", Err: fmt.Errorf("proxy: %w", errDown)}, FaultDestination},
	"a url's end":           {&url.Error{Op: "Post", URL: "http://x", Err: io.EOF}, FaultDestination},
	"a url's time":          {&url.Error{Op: "Post", URL: "http://x", Err: context.DeadlineExceeded}, FaultDestination},
	"a url's cancellation":  {&url.Error{Op: "Post", URL: "http://x", Err: context.Canceled}, FaultUnknown},
	"a url's anything":      {&url.Error{Op: "Post", URL: "http://x", Err: errOdd}, FaultUnknown},
	"a url's certificate":   {&url.Error{Op: "Post", URL: "https://x", Err: &tls.CertificateVerificationError{Err: errOdd}}, FaultDestination},
	"a url's plain text":    {&url.Error{Op: "Post", URL: "https://x", Err: tls.RecordHeaderError{Msg: "not TLS"}}, FaultDestination},
	"a url's own body":      {&url.Error{Op: "Post", URL: "http://x", Err: &http.MaxBytesError{Limit: 1}}, FaultUnknown},
	"a url's permanent":     {&url.Error{Op: "Post", URL: "http://x", Err: outbox.Permanent(errDown)}, FaultPermanent},
	"a url and another":     {errors.Join(&url.Error{Op: "Post", URL: "http://x", Err: errOdd}, errDown), FaultDestination},
	"urls":                  {errors.Join(&url.Error{Op: "parse", URL: ":", Err: errOdd}, &url.Error{Op: "Post", URL: ":", Err: errOdd}), FaultUnknown},

	// What cannot be an address is that of a message, or of all: only others show it.
	"address":            {&net.AddrError{Err: "missing port in address", Addr: "x"}, FaultUnknown},
	"dialled address":    {&net.OpError{Op: "dial", Net: "tcp", Err: &net.AddrError{Err: "invalid port", Addr: "99999"}}, FaultUnknown},
	"network":            {&net.OpError{Op: "dial", Net: "x", Err: net.UnknownNetworkError("x")}, FaultUnknown},
	"text of an address": {&net.ParseError{Type: "IP address", Text: "x"}, FaultUnknown},
	"kind of address":    {net.InvalidAddrError("unexpected kind"), FaultUnknown},

	// What the system says of the connection, and of what it was asked to send.
	"too long a datagram":  {&net.OpError{Op: "write", Net: "udp", Err: os.NewSyscallError("write", syscall.EMSGSIZE)}, FaultUnknown},
	"too long a name":      {&os.PathError{Op: "open", Path: "x", Err: syscall.ENAMETOOLONG}, FaultUnknown},
	"an argument":          {os.NewSyscallError("sendto", syscall.EINVAL), FaultUnknown},
	"reset":                {&net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ECONNRESET)}, FaultDestination},
	"a socket not there":   {&net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", syscall.ENOENT)}, FaultDestination},
	"an operation":         {&net.OpError{Op: "dial", Net: "tcp", Err: errOdd}, FaultDestination},
	"a network's own word": {networkError(false), FaultDestination},
	"a network's time":     {fmt.Errorf("publish: %w", networkError(true)), FaultDestination},
	"alert":                {&net.OpError{Op: "remote error", Err: tls.AlertError(42)}, FaultDestination},
}

// networkError is of a package that has errors of the network of its own.
type networkError bool

func (e networkError) Error() string { return "the line is noisy" }

func (e networkError) Timeout() bool { return bool(e) }

func (e networkError) Temporary() bool { return false }

type temporaryError bool

func (e temporaryError) Error() string { return "perhaps later" }

func (e temporaryError) Temporary() bool { return bool(e) }

func TestClassify(t *testing.T) {
	t.Parallel()

	for name, test := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			require.Equal(t, test.want, Classify(test.err))
		})
	}
}

// What net/http really returns.
func TestClassifyHTTP(t *testing.T) {
	t.Parallel()

	serve := func(handler http.HandlerFunc) string {
		server := httptest.NewServer(handler)
		t.Cleanup(server.Close)
		return server.URL
	}
	secure := httptest.NewUnstartedServer(http.NotFoundHandler())
	secure.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	secure.StartTLS()
	t.Cleanup(secure.Close)
	around := serve(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) })
	silent := serve(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	rude := serve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	// One that answers before it has all of a body may be quicker than what is wrong with it.
	works := serve(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })

	for name, test := range map[string]struct {
		url, header string
		body        io.Reader
		want        Fault
	}{
		"nobody listens":         {"http://127.0.0.1:1", "", nil, FaultDestination}, // a port that nobody is given
		"no such name":           {"http://nobody.invalid", "", nil, FaultDestination},
		"cut off":                {rude, "", nil, FaultDestination},
		"no answer":              {silent, "", nil, FaultDestination},
		"an unknown certificate": {secure.URL, "", nil, FaultDestination},
		"around in circles":      {around, "", nil, FaultUnknown},
		"a scheme that is none":  {"nats" + strings.TrimPrefix(works, "http"), "", nil, FaultUnknown},
		"no host":                {"http://", "", nil, FaultUnknown},
		"no port":                {"http://127.0.0.1:99999", "", nil, FaultUnknown},
		"no URL":                 {"http://a b", "", nil, FaultUnknown},
		"no header":              {works, "a\nb", nil, FaultUnknown},
		"a body that ends early": {works, "", strings.NewReader("short"), FaultUnknown},
		"a body that is too large": {
			works, "", http.MaxBytesReader(nil, io.NopCloser(strings.NewReader("long")), 2), FaultUnknown,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			ctx, cancel := context.WithCancel(t.Context())
			if test.url == silent {
				ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
			}
			defer cancel()
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, test.url, test.body)
			if err == nil {
				request.Header.Set("X-Metadata", test.header)
				if test.body != nil {
					request.ContentLength = 10
				}
				client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
				var response *http.Response
				if response, err = client.Do(request); err == nil {
					require.NoError(t, response.Body.Close())
				}
			}
			require.Error(t, err)
			require.Equal(t, test.want, Classify(err), "%T: %v", err, err)
		})
	}
}
