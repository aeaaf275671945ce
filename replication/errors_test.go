package replication

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

func TestErrors(t *testing.T) {
	t.Parallel()
	pg := func(code string) error { return fmt.Errorf("deep: %w", &pgconn.PgError{Code: code, Message: "m"}) }
	tests := []struct {
		about                          subject
		err                            error
		reason                         error
		retryable, gone, misconfigured bool
	}{
		{aboutConnection, pg("28000"), ErrNoPrivilege, false, false, true},
		{aboutConnection, pg("28P01"), ErrNoPrivilege, false, false, true},
		{aboutConnection, pg("42501"), ErrNoPrivilege, false, false, true},
		{aboutConnection, pg("3D000"), nil, false, false, true},
		{aboutConnection, pg("42704"), nil, false, false, true}, // a setting that does not exist
		{aboutConnection, pg("22023"), nil, false, false, true}, // one that has another type
		{aboutConnection, pg("53300"), ErrNoFreeSender, true, false, false},
		{aboutConnection, pg("57P03"), ErrShutdown, true, false, false},
		{aboutConnection, pg("08P01"), ErrUnsupported, false, false, true},
		{aboutConnection, pg("08006"), nil, true, false, false},
		{aboutSlot, pg("42704"), ErrSlotMissing, false, true, false},
		{aboutSlot, pg("42710"), ErrSlotExists, false, false, false},
		{aboutSlot, pg("55006"), ErrSlotInUse, true, false, false},
		{aboutSlot, pg("55P03"), ErrLockTimeout, true, false, false},
		{aboutSlot, pg("53400"), ErrNoFreeSlot, true, false, false},
		{aboutSlot, pg("0A000"), ErrUnsupported, false, false, true},
		{aboutSlot, pg("58P01"), ErrSlotLost, false, true, false},
		{aboutSlot, pg("55000"), nil, false, false, false},
		{aboutSlot, pg("57014"), nil, true, false, false},
		{aboutStream, pg("42704"), ErrPublicationMissing, false, false, true},
		{aboutStream, pg("58P01"), ErrSlotLost, false, true, false},
		{aboutStream, pg("57P01"), ErrShutdown, true, false, false},
		{aboutStream, pg("57P02"), ErrShutdown, true, false, false},
		{aboutStream, pg("XX000"), nil, false, false, false},
		{aboutPublication, pg("42710"), ErrPublicationExists, false, false, false},
		{aboutPublication, pg("42P01"), nil, false, false, true},
		{aboutConnection, io.ErrUnexpectedEOF, ErrConnectionLost, true, false, false},
		{aboutConnection, &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ETIMEDOUT)}, ErrConnectionLost, true, false, false},
		{aboutConnection, &net.DNSError{Err: "no such host"}, ErrConnectionLost, true, false, false},
		{aboutConnection, context.Canceled, nil, false, false, false},
		{aboutConnection, context.DeadlineExceeded, nil, false, false, false},
		{aboutConnection, errors.New("something else"), nil, false, false, false},
	}
	for _, test := range tests {
		t.Run(fmt.Sprint(test.about, test.err), func(t *testing.T) {
			t.Parallel()
			err := wrap("do", "name", test.about, test.err)
			require.ErrorIs(t, err, test.err)
			var wrapped *Error
			require.ErrorAs(t, err, &wrapped)
			require.Equal(t, test.reason, wrapped.Reason)
			require.Equal(t, test.retryable, IsRetryable(err), "retryable")
			require.Equal(t, test.gone, IsSlotGone(err), "slot gone")
			require.Equal(t, test.misconfigured, IsMisconfigured(err), "misconfigured")
			require.ErrorContains(t, err, `replication: do "name": `)
		})
	}
	require.False(t, IsRetryable(nil))
	require.False(t, IsRetryable(ErrClosed))
	require.False(t, IsRetryable(ErrConnTaken))
}

func TestErrorText(t *testing.T) {
	t.Parallel()
	require.EqualError(t, &Error{Op: "create slot", Name: "a", Reason: ErrSlotExists, Err: errors.New("cause")},
		`replication: create slot "a": the slot exists already: cause`)
	require.EqualError(t, &Error{Op: "connect"}, "replication: connect")
}
