# A fresh machine needs two commands: `make demo` and `make test`.
SHELL := /bin/bash
CARGO ?= cargo
OUT ?= out

.PHONY: help demo test test-python soak fuzz bench bench-peers evaluation guide lint build deb static deny setup guests clean

help:
	@echo "make demo    set up, build, checkpoint a VM, restore it, show the result, write $(OUT)/demo.html"
	@echo "make test    unit, property and end-to-end tests on real QEMU"
	@echo "make test-python  the Python package: types, and its tests on a real VM"
	@echo "make soak    10,000 seeds each of the simulations of the store and of replication, then recordings of minutes; KEYFRAME_SEEDS, KEYFRAME_SOAK_SECONDS"
	@echo "make fuzz    every parser of outside bytes; KEYFRAME_FUZZ_SECONDS each (30)"
	@echo "make bench   every benchmark; JSON in $(OUT)/bench"
	@echo "make bench-peers  databases and archivers that bench store compares with: installs them"
	@echo "make evaluation  chapter 6 of the SimuBoost checkpoint paper on this machine, an hour; CSV, plots, report in $(OUT)/evaluation"
	@echo "make guide   the guide (docs/guide) as a book, in $(OUT)/guide; installs mdBook into target/tools"
	@echo "make lint    formatting, clippy, licences, sources and bans of dependencies"
	@echo "make deny    cargo-deny: licences, banned crates, sources, advisories (3: these could not be had)"
	@echo "make build   target/release/keyframe"
	@echo "make deb     $(OUT)/keyframe_VERSION_amd64.deb, looked at by lintian, installed and removed in a directory"
	@echo "make static  $(OUT)/keyframe-static: a program that needs no library"

setup:
	@scripts/setup

build: setup
	$(CARGO) build --release --locked

guests: setup
	@guest=$$(guests/build small) && echo "guest files: $$guest"

demo: build guests
	@OUT=$(OUT) scripts/demo

test: guests
	@scripts/test

test-python: build guests
	@scripts/python-test

soak: setup
	@scripts/soak

fuzz: setup
	@scripts/fuzz

bench: build guests bench-peers
	@scripts/bench

bench-peers: setup
	@scripts/bench-peers

evaluation: build guests
	@scripts/evaluation

guide: setup
	@OUT=$(OUT) scripts/guide

lint: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@scripts/licences --test
	@scripts/licences

deny: setup
	@scripts/deny

deb: build
	@OUT=$(OUT) scripts/deb

static: setup
	@OUT=$(OUT) scripts/static

clean:
	$(CARGO) clean
	rm -rf $(OUT)
