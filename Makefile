# On a fresh Debian machine, `make demo` and `make test` install what they need.
SHELL := /bin/bash
CARGO ?= cargo
OUT ?= out

.PHONY: help demo test test-all compatibility test-python soak fuzz bench bench-peers evaluation guide lint build deb static deny setup guests clean

help:
	@echo "make demo         set up, build, checkpoint a VM, restore it; report in $(OUT)/demo.html"
	@echo "make test         unit, property and end-to-end tests on real QEMU, 25 minutes on two cores;"
	@echo "                  KEYFRAME_TEST_SEED (1) chooses the variants and the QEMU versions"
	@echo "make test-all     the same with every variant on every QEMU; takes far longer"
	@echo "make compatibility docs/compatibility.md: the features by QEMU 7.2, 10 and 11, from a run of their"
	@echo "                  tests with each, half an hour in all"
	@echo "make test-python  the Python package: types, and its tests on a real VM"
	@echo "make soak         tests that take long: 10,000 seeds of the simulations of the store and of"
	@echo "                  replication, long recordings, benchmarks; KEYFRAME_SEEDS, KEYFRAME_SOAK_SECONDS"
	@echo "make fuzz         every parser of outside bytes, KEYFRAME_FUZZ_SECONDS (30) each"
	@echo "make bench        every benchmark of keyframe-bench; JSON and plots in $(OUT)/bench"
	@echo "make bench-peers  install the databases and archivers that the store's benchmark compares with"
	@echo "make evaluation   chapter 6 of the SimuBoost checkpoint paper on this machine, three rounds of"
	@echo "                  an hour; measurements, CSV, plots and report in $(OUT)/evaluation. It goes on"
	@echo "                  where it was stopped; EVALUATION=\"--stop-after 100m\" makes a piece of it"
	@echo "make guide        the guide (docs/guide) as a book in $(OUT)/guide; builds mdBook in target/tools"
	@echo "make lint         formatting, clippy, and the licences, sources and bans of dependencies"
	@echo "make deny         licences, sources, bans and advisories of dependencies, with cargo-deny;"
	@echo "                  exit code 3: the advisories could not be fetched"
	@echo "make build        target/release/keyframe and target/release/keyframe-bench"
	@echo "make deb          $(OUT)/keyframe_VERSION_amd64.deb, checked with lintian and a trial installation"
	@echo "make static       $(OUT)/keyframe-static, a program that needs no library"
	@echo "make clean        remove target and $(OUT)"

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

test-all: guests
	@KEYFRAME_TEST_ALL=1 scripts/test

compatibility: guests
	@scripts/compatibility

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
	@scripts/evaluation $(EVALUATION)

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
