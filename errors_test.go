package outbox

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// codedError is an error of a driver that this package does not import.
type codedError string

func (e codedError) Error() string    { return "pq: " + string(e) }
func (e codedError) SQLState() string { return string(e) }

func TestMessageError(t *testing.T) {
	t.Parallel()

	err := error(&MessageError{Topic: strings.Repeat("t", 1000), Index: 3, UUID: strings.Repeat("u", 1000), Field: "uuid", Problem: "is odd"})
	require.ErrorIs(t, err, ErrInvalidMessage)
	require.NotErrorIs(t, err, ErrInvalidTopic)
	require.ErrorContains(t, err, "message 3 ")
	require.ErrorContains(t, err, "uuid is odd")
	require.Less(t, len(err.Error()), 500, "what is too long to be stored is too long to be read")

	cause := errors.New("the cause")
	err = fmt.Errorf("wrapped: %w", &MessageError{Err: cause})
	require.ErrorIs(t, err, ErrInvalidMessage)
	require.ErrorIs(t, err, cause)
}

// The same advice for each driver's error, which stays reachable.
func TestExplain(t *testing.T) {
	t.Parallel()

	for code, want := range map[string]struct {
		is   error
		text string
	}{
		"25006": {ErrReadOnly, ""},
		"42P01": {ErrNotInstalled, `schema "some"`},
		"3F000": {ErrNotInstalled, `schema "some"`},
		"42501": {nil, "see schema.Grants"},
		"25P02": {nil, "an earlier statement of the transaction failed"},
		"23505": {nil, ""},
	} {
		for _, server := range []error{&pgconn.PgError{Code: code}, codedError(code)} {
			server = fmt.Errorf("from the driver: %w", server)
			err := explain(server, "some")
			require.ErrorIs(t, err, server, code)
			require.ErrorContains(t, err, want.text, code)
			for _, sentinel := range []error{ErrReadOnly, ErrNotInstalled, ErrTxFinished} {
				require.Equal(t, want.is != nil && errors.Is(want.is, sentinel), errors.Is(err, sentinel), "%s: %v", code, sentinel)
			}
		}
	}
	for _, finished := range []error{pgx.ErrTxClosed, sql.ErrTxDone} {
		err := explain(fmt.Errorf("wrapped: %w", finished), "some")
		require.ErrorIs(t, err, ErrTxFinished)
		require.ErrorIs(t, err, finished)
	}
	other := errors.New("connection reset by peer")
	require.Equal(t, other, explain(other, "some"))
}
