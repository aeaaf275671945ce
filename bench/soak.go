package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	soakLength    = 30 * time.Minute
	soakInterval  = time.Minute // of a partition
	soakSealDelay = 15 * time.Second
	soakUpkeep    = 5 * time.Second
	// soakReport is how often progress is printed, at the least soakMinReport.
	soakReport    = time.Minute
	soakMinReport = 5 * time.Second
	// soakNaptime is the server's own default of autovacuum_naptime.
	soakNaptime = time.Minute

	soakTopics = 4
	// soakKeys take turns among the topics: a key belongs to one.
	soakKeys = 2000

	// soakMinRate is the share of the rate that must have been published for the
	// rest to mean anything.
	soakMinRate    = 0.95
	soakMinDropped = 10
	// soakMaxGrowth is how much more there may be in the last third than in the
	// middle one, at the most.
	soakMaxGrowth = 1.3
	// soakMaxDead is how many dead rows are none worth mentioning: autovacuum comes
	// at 50 and a fifth of a table, and transactions of a minute and a half keep it,
	// and the pruning of pages, from clearing what came meanwhile.
	soakMaxDead = 20_000
	soakMaxWait = 100 // ms
)

// soakScenario: the outbox beside a business that never rests, for half an hour, with
// partitions of a minute that everybody's upkeep looks after. Nothing may be lost or
// come out of order, nothing may grow, and upkeep may make nobody wait. It is one run,
// whatever -rounds says: what is compared are its last third and its middle one.
func soakScenario(ctx context.Context, b *bench) error {
	s, err := newSoak(ctx, b)
	if err != nil {
		return err
	}
	if s.database.server.Owned() {
		naptime := max(b.duration(soakNaptime).Round(time.Second), time.Second)
		if err := s.database.configure(ctx, "SET autovacuum = on", fmt.Sprintf("SET autovacuum_naptime = '%ds'", int(naptime.Seconds()))); err != nil {
			return err
		}
	}
	waits, err := watchLockWaits(ctx, s.database)
	if err != nil {
		return err
	}
	_, err = b.turn(ctx, b.scenario, contender{run: func(ctx context.Context) (float64, error) { return 0, s.run(ctx) }})
	long, known, logErr := waits.end(ctx, soakWriterName)
	err = errors.Join(err, logErr)
	if s.database.server.Owned() {
		reset := context.WithoutCancel(ctx)
		err = errors.Join(err, s.database.configure(reset, "RESET autovacuum", "RESET autovacuum_naptime"))
	}
	if err == nil {
		err = s.report()
	}
	if err == nil && known {
		b.addLockWaits(long)
	}
	return err
}

// soakDatabase makes a database whose partitions are short, with the upkeep for them.
func (b *bench) soakDatabase(ctx context.Context) (*database, outbox.MaintenanceConfig, error) {
	interval := max(b.duration(soakInterval).Round(time.Second), schema.MinPartitionInterval)
	d, err := b.databaseWith(ctx, schema.Config{PartitionInterval: interval, LookAhead: 10 * interval})
	return d, outbox.MaintenanceConfig{
		Interval: max(b.duration(soakUpkeep), outbox.MinMaintenanceInterval), Retention: interval, SealDelay: b.duration(soakSealDelay),
	}, err
}

// soakTopic is the name of a topic, by number.
func soakTopic(i int) string { return fmt.Sprint("topic ", i) }

// soak is one run.
type soak struct {
	*bench

	database *database
	upkeep   outbox.MaintenanceConfig
	keys     []*soakKey
	writing  *pgxpool.Pool
	writers  *soakWriters
	groups   *soakGroups
	watch    *soakWatch
	// rate is how many messages a second were published, live the share of samples
	// in which the group had its messages from the WAL.
	rate float64
	live series
}

func newSoak(ctx context.Context, b *bench) (*soak, error) {
	d, upkeep, err := b.soakDatabase(ctx)
	if err != nil {
		return nil, err
	}
	s := &soak{bench: b, database: d, upkeep: upkeep}
	for i := range uint32(soakKeys) {
		s.keys = append(s.keys, &soakKey{number: i})
	}
	return s, nil
}

func (s *soak) run(ctx context.Context) (err error) {
	config, err := s.database.config()
	if err != nil {
		return err
	}
	config.MaxConns = soakConns + soakLongs
	config.ConnConfig.RuntimeParams["application_name"] = soakWriterName
	if s.writing, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	defer s.writing.Close()
	publisher, err := outbox.NewPublisher(nil, outbox.PublisherConfig{RequireTx: true}, nil)
	if err != nil {
		return err
	}
	s.writers = &soakWriters{options: s.options, pool: s.writing, publisher: publisher, keys: s.keys, length: s.duration(soakLength)}
	if s.groups, err = newSoakGroups(ctx, s.bench, s.database, s.upkeep, len(s.keys)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.groups.close()) }()
	if err := awaitLive(ctx, s.groups.live); err != nil {
		s.logf("begins without the WAL: %v", err)
	}

	var reported time.Duration
	s.watch = &soakWatch{database: s.database, every: max(s.duration(soakSizeLook), 2*soakLockLook)}
	s.watch.each = func(sample soakSample) {
		committed := s.writers.committed.Load()
		live := 100.0
		if notLive(s.groups.live) != nil {
			live = 0
		}
		s.live = append(s.live, live)
		behind := s.groups.look(committed)
		if sample.at >= reported {
			reported += max(s.duration(soakReport), soakMinReport)
			s.logf("%s: %d published%s; %s MB in %d partitions, %d dropped", sample.at.Round(time.Second), committed, behind,
				number(sample.log/1e6), int(sample.partitions), s.watch.dropped())
		}
	}
	group, working := errgroup.WithContext(ctx)
	watching, stop := context.WithCancel(working)
	defer stop()
	group.Go(func() error { return s.watch.run(working, watching) })
	group.Go(func() error {
		defer stop()
		if err := s.writers.run(working); err != nil {
			return err
		}
		s.rate = float64(s.writers.committed.Load()) / time.Since(s.writers.start).Seconds()
		return s.groups.await(working, s.keys)
	})
	return group.Wait()
}

// report adds the figures.
func (s *soak) report() error {
	add := func(metric, unit string, value float64, required *requirement) {
		s.add(newFigure(s.scenario, metric, unit, series{value}, nil, required))
	}
	add(fmt.Sprintf("published in %s", s.duration(soakLength)), "messages/s", s.rate, minValue(soakMinRate*soakRate))
	add("long transactions that committed", "", float64(s.writers.longEnded[0].Load()), nil)
	add("long transactions that were rolled back", "", float64(s.writers.longEnded[1].Load()), nil)
	var rolledBack int64
	for _, g := range s.groups.list {
		if g.strange != nil {
			return fmt.Errorf("group %s: %w", g.name, g.strange)
		}
		add(g.name+": lost", "messages", float64(g.lost(s.keys)), maxValue(0))
		add(g.name+": out of order", "messages", float64(g.disordered), maxValue(0))
		add(g.name+": repeated", "messages", float64(g.repeated), nil)
		add(g.name+": behind, at most", "messages", float64(g.behind), nil)
		rolledBack += g.rolledBack
	}
	add("delivered of transactions that were rolled back", "messages", float64(rolledBack), maxValue(0))
	s.add(newFigure(s.scenario, "live: had its messages from the WAL", "% of the time", series{mean(s.live)}, nil, nil))

	add("partitions dropped", "", float64(s.watch.dropped()), minValue(soakMinDropped))
	s.growth("log, at most in the last third, against the middle one", "MB", 1e6, func(m soakSample) float64 { return m.log }, maxRatio(soakMaxGrowth))
	s.growth("other tables, likewise", "MB", 1e6, func(m soakSample) float64 { return m.others }, nil)
	// Empty ones among them, which are dropped when that makes nobody wait.
	s.growth("partitions, likewise", "", 1, func(m soakSample) float64 { return m.partitions }, maxRatio(soakMaxGrowth))
	s.growth("rows in the DEFAULT partition, likewise", "", 1, func(m soakSample) float64 { return m.spare }, nil)
	dead := maxRatio(soakMaxGrowth).or(maxValue(soakMaxDead))
	s.growth("dead rows of the log, likewise", "", 1, func(m soakSample) float64 { return m.deadInLog }, dead)
	s.growth("dead rows of other tables, likewise", "", 1, func(m soakSample) float64 { return m.deadInOther }, dead)

	add("longest wait of a writer for a lock because of upkeep", "ms", s.watch.byUpkeep, maxValue(soakMaxWait))
	if s.watch.culprit != "" {
		s.logf("the longest wait because of upkeep was for: %s", s.watch.culprit)
	}
	add("longest wait of a writer for any lock", "ms", s.watch.byAll, nil)
	add("longest time between two looks at the locks", "ms", s.watch.gap, nil)
	add("longest transaction of a writer that is not long", "ms", float64(s.writers.slowest.Load())/float64(time.Millisecond), nil)
	return nil
}

// growth adds the most there was of something in the last third, against the middle
// one.
func (s *soak) growth(metric, unit string, per float64, of func(soakSample) float64, required *requirement) {
	middle, last := s.watch.thirds(s.writers.length, func(m soakSample) float64 { return of(m) / per })
	if middle == nil || last == nil {
		f := newFigure(s.scenario, metric, unit, series{0}, nil, required)
		f.invalidate("there is no sample of one of the thirds")
		s.add(f)
		return
	}
	s.add(newFigure(s.scenario, metric, unit, last, middle, required))
}

// mean returns the mean, and 0 of none.
func mean(s series) float64 {
	var sum float64
	for _, x := range s {
		sum += x
	}
	return sum / float64(max(len(s), 1))
}
