package pgtest

import (
	"context"
	"errors"
	"sync"
)

// templates are the data folders of new clusters that servers are copies of, one
// for each folder of programs: initdb takes a second, a copy a few hundredths of
// one. They are there only while Main runs the tests, and never started.
var templates struct {
	mu     sync.Mutex
	inUse  bool
	copies uint64 // made of all of them
	byBin  map[string]*supervisor
}

// useTemplates is called before the tests.
func useTemplates() {
	templates.mu.Lock()
	defer templates.mu.Unlock()
	templates.inUse, templates.byBin = true, map[string]*supervisor{}
}

// removeTemplates removes them after the tests; servers made later run initdb.
func removeTemplates() error {
	templates.mu.Lock()
	defer templates.mu.Unlock()
	var errs []error
	for _, sup := range templates.byBin {
		errs = append(errs, sup.close())
	}
	templates.inUse, templates.byBin = false, nil
	return errors.Join(errs...)
}

// newCluster fills the data folder of a new cluster: by initdb, or from a template.
func newCluster(ctx context.Context, sup *supervisor) error {
	folder, copies, err := template(ctx, sup.bin)
	if err != nil {
		return err
	}
	if folder == "" {
		return initialise(ctx, sup)
	}
	if err := sup.copy(ctx, folder); err != nil {
		return err
	}
	return changeIdentifier(sup.folder, copies)
}

// template returns the folder of the template that the programs in bin have made,
// and how many copies there are of any with the one that is to be made now. The
// folder is empty if none is to be made. Others wait while initdb runs.
func template(ctx context.Context, bin string) (folder string, copies uint64, err error) {
	templates.mu.Lock()
	defer templates.mu.Unlock()
	if !templates.inUse {
		return "", 0, nil
	}
	sup := templates.byBin[bin]
	if sup == nil {
		u, err := unprivileged()
		if err != nil {
			return "", 0, err
		}
		if sup, err = supervise(ctx, bin, parentFolder(false), u); err != nil {
			return "", 0, err
		}
		if err := initialise(ctx, sup); err != nil {
			return "", 0, errors.Join(err, sup.close())
		}
		templates.byBin[bin] = sup
	}
	templates.copies++
	return sup.folder, templates.copies, nil
}
