# Two commands do everything on a fresh Debian or Ubuntu machine: `make demo` and `make test`.
# install-deps.sh may have installed cargo for this user only.
export PATH := $(HOME)/.cargo/bin:$(PATH)

MINUTES ?= 30

.PHONY: demo test soak dist bench-server lint clean deps

demo: deps
	cargo build --release -p remoca-cli -p remoca-demo
	cargo run --release --quiet -p remoca-demo

test: deps
	cargo xtask test

# SEED=N repeats the order of events of an earlier run.
soak: deps
	cargo run --package remoca-guest-tests --bin soak -- $(MINUTES) $(SEED)

dist: deps
	cargo xtask dist

bench-server: deps
	cargo run --release -p remoca-bench -- server

lint:
	cargo xtask lint

deps:
	scripts/install-deps.sh

clean:
	rm -rf target out .cache
