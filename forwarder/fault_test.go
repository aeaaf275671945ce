package forwarder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"syscall"
	"testing"

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
	"url":            {&url.Error{Op: "Post", URL: "http://x", Err: errOdd}, FaultDestination},
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
}

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
