# What contributors and CI run. `make` lists the targets.

GO ?= go
# Flags for go test, such as GOTESTFLAGS='-v -run TestSubscribe -count 5'.
GOTESTFLAGS ?=
# Flags for the benchmarks; BENCHFLAGS=-h lists them.
BENCHFLAGS ?=
# How many tests of a package run at once: more than there are processors, since
# they wait for leases, pauses and servers half of the time.
PARALLEL ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))
# How long each fuzz target runs.
FUZZTIME ?= 10s

# The modules of go.work, and all their packages.
MODULES = $(shell $(GO) list -m -f '{{.Dir}}')
PACKAGES = $(addsuffix /...,$(MODULES))

LINTER = bin/golangci-lint

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-postgres test-race prove bench fuzz build vet lint fmt tidy tidy-check check

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: ## Run an order service with an outbox, and check what it delivers
	$(GO) run ./examples/quickstart

# A run of the tests keeps the proofs short: see prove.
test test-race: export OUTBOX_TEST_KILLS ?= 8
test: ## Run the tests of all modules (GOTESTFLAGS)
	$(GO) test -timeout 14m -parallel $(PARALLEL) -skip '^TestMutations$$' $(GOTESTFLAGS) $(PACKAGES)

# The programs of version V are found on the machine, or downloaded.
test-postgres: export OUTBOX_POSTGRES_VERSION = $(V)
test-postgres: ## Run the tests of all modules on version V of PostgreSQL (V=18)
	@test -n '$(V)' || { echo 'which version? make test-postgres V=18' >&2; exit 2; }
	$(GO) run ./internal/pgtest/cmd/postgres -version
	@$(MAKE) --no-print-directory test

test-race: ## Run the tests with the race detector (GOTESTFLAGS)
	$(GO) test -race -timeout 20m -parallel $(PARALLEL) -skip '^TestMutations$$' $(GOTESTFLAGS) $(PACKAGES)

prove: ## Kill the consumer 50 times, weaken each mechanism and see its test fail
	$(GO) test -v -count=1 -timeout 30m -run '^(TestKill|TestMutations)$$' ./tests

bench: ## Run the benchmarks (BENCHFLAGS)
	$(GO) run ./bench $(BENCHFLAGS)

fuzz: ## Run each fuzz target for a moment (FUZZTIME)
	@set -e; grep -rl --include='*_test.go' '^func Fuzz' . | while read -r file; do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\).*/\1/p' "$$file"); do \
			echo "$$(dirname "$$file") $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")"; \
		done; \
	done

build: ## Compile all packages
	$(GO) build $(PACKAGES)

vet: ## Run go vet
	$(GO) vet $(PACKAGES)

lint: $(LINTER) ## Run the linters and check the formatting
	$(LINTER) run $(PACKAGES)

fmt: $(LINTER) ## Format the source
	$(LINTER) fmt

tidy: ## Tidy all go.mod files
	@set -e; for module in $(MODULES) tools; do GOWORK=off $(GO) -C $$module mod tidy; done

tidy-check: ## Check that all go.mod files are tidy
	@set -e; for module in $(MODULES) tools; do GOWORK=off $(GO) -C $$module mod tidy -diff; done

check: tidy-check lint vet build test quickstart ## Run what CI runs

# Of the version in tools/go.mod, which is no part of the workspace: none of its
# dependencies becomes ours. The first build takes some minutes.
$(LINTER): tools/go.mod tools/go.sum
	GOWORK=off $(GO) build -C tools -o ../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
