# Two commands do everything on a fresh Debian or Ubuntu machine: `make demo` and `make test`.
# install-deps.sh may have installed cargo for this user only.
export PATH := $(HOME)/.cargo/bin:$(PATH)

MINUTES ?= 30
# Not `cargo run`, which would build all again, with the features of this one program.
RELEASE = "$${CARGO_TARGET_DIR:-target}/release"

.PHONY: demo test test-long soak dist bench-server bench-targets bench-allocation lint clean deps

demo: deps
	cargo build --release -p remoca-cli -p remoca-demo
	$(RELEASE)/remoca-demo

# A build from nothing needs no data for the next one: 2 GB less on the disk.
test: deps
	CARGO_INCREMENTAL=0 cargo xtask test

# Tests that take too long for `make test`. TESTS="a b" runs those with a or b in their names.
test-long: deps
	cargo xtask test-long $(TESTS)

# SEED=N repeats the order of events of an earlier run.
soak: deps
	cargo run --package remoca-guest-tests --bin soak -- $(MINUTES) $(SEED)

dist: deps
	cargo xtask dist

bench-server: deps
	cargo run --release -p remoca-bench -- server

# All targets, P1 to P20 and rows A1.3 to A1.10 and A2.3: out/bench/targets.json, and a table. ONLY=P9,P10 runs some; about 25 minutes for all.
bench-targets: deps
	cargo build --release -p remoca-cli -p remoca-bench
	cargo build --release -p remoca-cli --features ablation --bin remoca-ablation
	$(RELEASE)/remoca-bench targets $(if $(ONLY),--only $(ONLY))

# Local tiers of three guests, divided by their curves, then a round in which the guests lend memory of their own, and what came of it:
# out/bench/allocation.json. Blocks are counted, so other load does not matter; about 40 minutes. PART=tiers or PART=guests runs one.
bench-allocation: deps
	cargo run --package remoca-guest-tests --bin allocation $(PART)

lint:
	cargo xtask lint

deps:
	scripts/install-deps.sh

clean:
	rm -rf target out .cache
