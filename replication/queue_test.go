package replication

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// frames are the bodies in a chunk.
func frames(chunk []byte) []string {
	var list []string
	for len(chunk) > 0 {
		length := binary.BigEndian.Uint32(chunk)
		list = append(list, string(chunk[frameLength:frameLength+length]))
		chunk = chunk[frameLength+length:]
	}
	return list
}

// Random operations, against a list: what goes in comes out, in order, except
// for keepalives that another one has followed; and the bound holds.
func TestQueueAgainstModel(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for run := range 40 {
		limit := MinQueueBytes << r.IntN(9)
		q := newQueue(limit)
		var model []string
		size := func() (n int) {
			for _, body := range model {
				n += frameLength + len(body)
			}
			return n
		}
		var taken []byte
		takenSize := 0
		for op := range 500 {
			where := fmt.Sprintf("seed %d, run %d, operation %d", seed, run, op)
			switch r.IntN(3) {
			case 0, 1:
				space := q.space()
				require.Equal(t, size()+takenSize >= limit, space != nil, where)
				if space != nil {
					break
				}
				f := frame{kind: frameData}
				body := fmt.Sprintf("%d %*s", op, r.IntN(1<<r.IntN(17)), "x")
				if r.IntN(3) == 0 {
					f.kind, body = frameKeepalive, fmt.Sprintf("keepalive %8d", op)
					if len(model) > 0 && model[len(model)-1][0] == 'k' {
						model = model[:len(model)-1]
					}
				}
				require.NoError(t, q.put(f, []byte(body)))
				model = append(model, body)
			case 2:
				if taken != nil {
					q.giveBack(taken)
				}
				chunk, err := q.poll()
				require.NoError(t, err)
				require.Equal(t, len(model) == 0, chunk == nil, where)
				got := frames(chunk)
				require.Equal(t, append([]string{}, model[:len(got)]...), append([]string{}, got...), where)
				taken, takenSize = chunk, len(chunk)
				model = append([]string{}, model[len(got):]...)
			}
			require.Equal(t, size()+takenSize, q.queued(), where)
		}
	}
}

// What lies in a chunk that was taken stays as it is, until it is given back.
func TestQueueLeavesTakenAlone(t *testing.T) {
	t.Parallel()
	q := newQueue(1 << 20)
	require.NoError(t, q.put(frame{kind: frameKeepalive}, []byte("first")))
	chunk, err := q.poll()
	require.NoError(t, err)
	require.NoError(t, q.put(frame{kind: frameKeepalive}, []byte("again")))
	require.NoError(t, q.put(frame{kind: frameData}, []byte("other")))
	require.Equal(t, []string{"first"}, frames(chunk))
	q.giveBack(chunk)
	chunk, err = q.poll()
	require.NoError(t, err)
	require.Equal(t, []string{"again", "other"}, frames(chunk))
}

// Owner and consumer at full speed.
func TestQueueStress(t *testing.T) {
	t.Parallel()
	const count = 50_000
	q := newQueue(4096)
	over := errors.New("over")
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; i < count; {
			if space := q.space(); space != nil {
				<-space
				continue
			}
			if err := q.put(frame{kind: frameData}, fmt.Appendf(nil, "%0*d", 1+i%97, i)); err != nil {
				t.Error(err)
			}
			if i++; i%13 == 0 {
				q.flush(true)
			}
		}
		q.end(over)
	})
	next := 0
	var chunk []byte
	var err error
	for {
		if chunk != nil {
			q.giveBack(chunk)
		}
		chunk, err = q.next(context.Background())
		if err != nil {
			break
		}
		for _, body := range frames(chunk) {
			require.Equal(t, fmt.Sprintf("%0*d", 1+next%97, next), body)
			next++
		}
	}
	require.Equal(t, over, err)
	require.Equal(t, count, next)
	wg.Wait()
}
