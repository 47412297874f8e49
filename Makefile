# Thin targets; each makes what it needs. PYTHON picks the interpreter (>= 3.11).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Demo and tests start a hundred processes: each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
TESTS_COMPILED := $(addprefix tests/,test_fuzz.py proxy/core proxy/net/test_timeouts.py proxy/net/upstream proxy/protocol \
	proxy/request proxy/state proxy/telemetry \
	$(addprefix scenarios/test_,$(addsuffix .py,breaker cycles disconnect hedge migration migration_bytes offload overload reuse streams)) \
	proxy/process/test_drain.py)
COMPILED := PYTHONPATH=.cache/compiled:. $(BIN)/python -P
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: compiled dist demo demo-kill demo-compare demo-check test test-long test-figures test-compiled test-install test-clients test-vllm chaos migration soak soak-hostile lint docs bench bench-core bench-shell bench-routing bench-planner clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: give another with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[replay]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e '.[dev]'
	@touch $@

## The default policy beside round robin, then an offload, on simulated engines; a page with figures. A minute.
demo: $(VENV)/.installed
	$(BIN)/python -m replayer.demo

## One engine killed in the middle: nothing is lost that had not begun to stream.
demo-kill: $(VENV)/.installed
	$(BIN)/python -m replayer.demo --kill-engine-after 80 --out .cache/demo-kill

## A whole trace with and without offloads: the output is equal, request by request.
demo-compare: $(VENV)/.installed
	$(BIN)/python -m replayer.demo --offload-policy seed-heuristic --out .cache/demo-offloads
	$(BIN)/python -m replayer.demo --offload-policy never --out .cache/demo-never
	$(BIN)/analyze compare .cache/demo-offloads .cache/demo-never --require-identical

## A run against its prediction in virtual time: TTFT within 15 % at p50 and p90.
demo-check: $(VENV)/.installed
	$(BIN)/python -m replayer.demo --offload-policy seed-heuristic --out .cache/demo-check
	$(BIN)/analyze check .cache/demo-check --json .cache/demo-check/check.json

## Every test of half a second or less. Three workers on two cores: many tests wait, and each worker collects them all.
## In a fresh clone pytest's form of the modules is compiled first, or each worker would do it.
test: $(VENV)/.installed-dev
	@test -d tests/proxy/core/__pycache__ || $(BIN)/python -m pytest -q --collect-only --ignore=tests/chaos >/dev/null || true
	$(BIN)/python -m pytest -q -n 3 --dist worksteal --ignore=tests/chaos --ignore=tests/scenarios -m 'not figures and not long'

## The others: what a user meets, played to its end by proxy, engines, planner, clients; properties; the demos.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 4 --dist worksteal --ignore=tests/chaos -m 'long and not figures'

## Claims of docs/ in virtual time: what the policy wins, what an oracle finds.
test-figures: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m figures tests/analysis tests/scenarios

## The same for what is compiled to C; see setup.py.
test-compiled: compiled
	$(BIN)/pytest -q -o pythonpath='.cache/compiled . plugins/vllm-thermal' -o cache_dir=.cache/compiled/.pytest_cache \
		$(TESTS_COMPILED)

## The wheel in an empty environment, and the Containerfile's steps run in a folder: no container engine needed.
test-install: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q tests/install

## Packages in dist/: the sources, a wheel for every machine, and one compiled for this machine.
dist: $(VENV)/.installed-dev
	rm -rf dist build
	$(BIN)/python -m build
	@echo "compiling the path of a request: about three minutes on two cores"
	CACHE_PROXY_COMPILE=1 $(BIN)/python -m build --wheel
	@ls -1 dist

## The project as `CACHE_PROXY_COMPILE=1 pip install .` installs it.
compiled: .cache/compiled/.installed

.cache/compiled/.installed: $(VENV)/.installed-dev setup.py \
		$(shell find proxy replayer analysis planner -name "*.py")
	rm -rf build .cache/compiled
	@echo "compiling the path of a request: about three minutes on two cores"
	CACHE_PROXY_COMPILE=1 $(INSTALL) --no-deps --target .cache/compiled .
	@touch $@

## Every fault of tests/chaos/faults.toml, and what must hold after each. See docs/contribute/chaos.md.
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/chaos

## Streams cut at a thousand random bytes, and before each byte of one, that go on elsewhere.
migration: $(VENV)/.installed-dev
	MIGRATION_CUTS=1000 $(BIN)/python -m pytest -q $(addprefix tests/scenarios/test_migration,.py _bytes.py)

## Load with a fault every ten seconds, for SOAK_MINUTES: what is lost, what grows.
SOAK_MINUTES ?= 30
soak: $(VENV)/.installed-dev
	$(BIN)/python -m bench.faults.soak --minutes $(SOAK_MINUTES)

## Load with hostile requests beside it in every second minute: what the others lose, and wait.
soak-hostile: $(VENV)/.installed-dev
	$(BIN)/python -m bench.faults.soak --minutes $(SOAK_MINUTES) --rate 100 --hostile 0.01

## The proxy in front of real vLLM engines on the CPU; VLLM="-k faults" for a part of it.
test-vllm: $(VENV)/.installed-dev
	$(PYTHON) tests/real_vllm/engines/install.py .cache/vllm
	$(BIN)/python -m pytest -q tests/real_vllm $(VLLM)

## Real agents from npm in front of the proxy, in a network namespace with loopback only; CLIENTS="-k codex"
## for a part of it. Skipped, with a word, where there is no npm or no namespace.
test-clients: $(VENV)/.installed-dev
	$(BIN)/python -m tests.clients $(CLIENTS)

## Format, rules, types.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

## The site of docs/ in .cache/site; a broken link fails. It can be served from there:
## python3 -m http.server --bind 127.0.0.1 --directory .cache/site
docs: $(VENV)/.installed-docs
	$(BIN)/python -m docs.pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

## What the proxy costs beside its peers, minutes; BENCH="--quick" for less. See docs/contribute/measuring.md.
bench: compiled
	$(BIN)/python -m bench.cost --json .cache/bench/result.json $(BENCH)

## What one decision costs, without any network.
bench-core: compiled
	$(COMPILED) -m bench.core --json .cache/bench-core.json $(BENCH)

## What one request costs the whole process but the kernel, and the calls that it makes.
bench-shell: compiled
	$(COMPILED) -m bench.shell

## Routing quality beside other routers, on engines that are not ours: hours, or minutes with
## ROUTING="--quick". See docs/contribute/measuring.md.
bench-routing: $(VENV)/.installed-dev
	$(BIN)/python -m bench.routing --out .cache/routing/result.json.gz $(ROUTING)

## Planners in the replay of NVIDIA Dynamo, beside rivals and one that knows the future: hours, or minutes with
## PLANNER="--policies static,MODULE:CLASS --loads ramp". See docs/contribute/measuring.md.
bench-planner: $(VENV)/.installed-dev
	$(BIN)/python -m bench.planner --out .cache/planner/result.json $(PLANNER)

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
