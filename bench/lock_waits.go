package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
)

// lockWaits counts the lock waits that the server itself logs: every one that is
// longer than soakMaxWait, while who looks from outside may miss one between two
// looks.
type lockWaits struct {
	database *database
	from     int64 // in the log
}

// watchLockWaits begins. On a server that is not ours it watches nothing: its
// settings are not to be changed.
func watchLockWaits(ctx context.Context, d *database) (*lockWaits, error) {
	w := &lockWaits{database: d}
	if !d.server.Owned() {
		return w, nil
	}
	if err := d.configure(ctx, "SET log_lock_waits = on", fmt.Sprintf("SET deadlock_timeout = '%dms'", soakMaxWait), "SET log_line_prefix = '%m [%p] %a: '"); err != nil {
		return nil, err
	}
	info, err := os.Stat(d.server.LogFile())
	if err != nil {
		return nil, err
	}
	w.from = info.Size()
	return w, nil
}

// end returns how many waits of the application for locks on tables there were, and
// whether that is known.
func (w *lockWaits) end(ctx context.Context, application string) (n int, known bool, err error) {
	if !w.database.server.Owned() {
		return 0, false, nil
	}
	err = w.database.configure(context.WithoutCancel(ctx), "RESET log_lock_waits", "RESET deadlock_timeout", "RESET log_line_prefix")
	file, openErr := os.Open(w.database.server.LogFile())
	if openErr != nil {
		return 0, false, errors.Join(err, openErr)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if _, seekErr := file.Seek(w.from, 0); seekErr != nil {
		return 0, false, errors.Join(err, seekErr)
	}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		line := lines.Text()
		if strings.Contains(line, "] "+application+": ") && strings.Contains(line, " still waiting for ") && strings.Contains(line, " on relation ") {
			n++
		}
	}
	return n, true, err
}

// addLockWaits adds the figure of how many there were of writers.
func (b *bench) addLockWaits(n int) {
	metric := fmt.Sprintf("waits of writers for a table of more than %d ms, by the server's log", soakMaxWait)
	b.add(newFigure(b.scenario, metric, "", series{float64(n)}, nil, maxValue(0)))
}
