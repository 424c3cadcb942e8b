# Everything that is made lies in .venv and in the user's cache folder. PYTHON=... chooses the Python, ARGS=... passes
# arguments on: make chat ARGS="--model llama3.2-1b"
BIN := .venv/bin
PYTHON ?=
ARGS :=
# The oldest MLX that pyproject.toml allows.
MLX := 0.32.2
INSTALL := PYTHON="$(PYTHON)" sh scripts/venv.sh

.PHONY: help chat app test lint mutants test-mac test-mlx test-peers bench bench-convert fuzz soak clean
# The chat needs standard input, which make gives to one job only.
.NOTPARALLEL:

help:
	@echo "make chat          chat with the demo model; ARGS=\"--model llama3.2-1b\" for another"
	@echo "make app           the desktop UI with the demo model; ARGS as above"
	@echo "make test          all tests"
	@echo "make test-mac      all tests on a stand-in for a Mac: MLX with a GPU, on macOS, computed on Linux (an hour)"
	@echo "make lint          ruff's checks and format, and the types of all signatures (mypy)"
	@echo "make test-mlx      all tests with another MLX: MLX=0.32.2, the oldest that is allowed, or MLX=newest"
	@echo "make bench         speed and memory beside mlx-lm, llama.cpp and transformers; ledger of the kernels (an hour)"
	@echo "make bench-convert memory and speed of the converter beside mlx-lm (minutes, 20 GB of disk)"
	@echo "make fuzz          100,000 damaged files for each reader of checkpoints"
	@echo "make mutants       plants faults in the Metal kernels, which their tests must notice (half an hour)"
	@echo "make test-peers    tests beside llama.cpp, which is compiled first (minutes), and torch"
	@echo "make soak          the long tests: a stream of 4,000 tokens in the UI, a needle in 6,000 tokens"
	@echo "make clean         remove .venv and what tools left behind"

# exec: a shell in between would be killed by the Ctrl-C that only stops an answer.
chat: .venv/installed
	@exec $(BIN)/mlx-llama3 chat $(ARGS)

app: .venv/installed
	@exec $(BIN)/mlx-llama3 app $(ARGS)

test: lint
	@sh scripts/chromium.sh
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# Twice: with mx.compile, and with every fused kernel run (tests/mac/README.md). The fused kernels' own tests need no Mac.
test-mac: .venv/installed-test
	@sh scripts/chromium.sh
	@for mode in compiled kernels; do \
		MAC_STAND_IN=$$mode $(BIN)/python -m pytest -p tests.mac.plugin -n 2 --dist loadfile \
			--ignore tests/mac --ignore tests/metal --ignore tests/metal_harness $(ARGS) || exit 1; \
	done

lint: .venv/installed-test
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

bench: .venv/installed-peers
	@$(BIN)/python benchmarks/startup.py 1
	@$(BIN)/python benchmarks/side_by_side.py --plot docs $(ARGS)
	@$(BIN)/python benchmarks/building.py
	@$(BIN)/python benchmarks/tracing.py
	@$(BIN)/python benchmarks/speculative.py
	@$(BIN)/python benchmarks/batch.py
	@$(BIN)/python -m benchmarks.ledger
	@$(BIN)/python -m benchmarks.cache_copies

bench-convert: .venv/installed-test
	@$(BIN)/python benchmarks/convert_memory.py $(ARGS)

fuzz: .venv/installed-test
	@$(BIN)/python tests/support/fuzz_readers.py $(ARGS)

mutants: .venv/installed-test
	@$(BIN)/python tests/support/kernel_mutants.py $(ARGS)

soak: .venv/installed-test
	@SOAK=1 $(BIN)/python -m pytest tests/app/ui -k "long_fast_stream or many_turns" -s $(ARGS)
	@SOAK=1 $(BIN)/python -m pytest tests/mlx_llama3/generation/test_needle.py -s $(ARGS)

test-mlx: .venv/installed-test
	@sh scripts/test_mlx.sh $(MLX) $(ARGS)

test-peers: .venv/installed-peers
	@$(BIN)/python -m pytest -m peers $(ARGS)

# </dev/null: standard input holds the person's messages, which only the chat may read.
.venv/installed: pyproject.toml scripts/venv.sh
	@$(INSTALL) </dev/null
	@touch $@

.venv/installed-test: pyproject.toml scripts/venv.sh
	@$(INSTALL) test </dev/null
	@touch $@ .venv/installed

.venv/installed-peers: pyproject.toml scripts/venv.sh
	@$(INSTALL) test,peers </dev/null
	@touch $@ .venv/installed .venv/installed-test

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
