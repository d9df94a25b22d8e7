# Every target works from a fresh clone: it makes what it needs, once.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
# Where other people's clients are installed, for the tests.
CLIENTS_VENV ?= .venv-clients
# The engine to install: cpu, or gpu (CUDA). An environment keeps the one it has.
EXTRA ?= $(if $(wildcard $(VENV)/.setup-gpu),gpu,cpu)

# For `make run`; PREFILL=1 DECODE=1 when none of the three counts is set.
ENGINE ?= vllm
PORT ?= 8000
# Where it listens; from the command line alone, since some shells export a HOST of theirs.
RUN_HOST = $(if $(findstring command,$(origin HOST)),$(HOST))
PREFILL ?=
DECODE ?=
AGGREGATED ?=
FRONTENDS ?=
# Of each frontend; auto: one a core.
PROCESSES ?=
MODEL ?=
TOOL_CALL_PARSER ?=
REASONING_PARSER ?=
# Where hidden states are saved, and of which layers: CAPTURE=DIR LAYERS=2,15,28,30.
CAPTURE ?=
LAYERS ?=
SERVED_MODEL_NAME ?= $(if $(MODEL),,smollm2)
# After `--`, untouched: engine arguments for the workers.
ENGINE_ARGS ?=

# For the fuzzing: more arguments.
FUZZ ?=

# For the fault suite: more arguments, as in `make faults FAULTS='--kind cut --jobs 1'`.
FAULTS ?=

# For the demonstration of kills: more arguments, as in `make kill-demo KILL='--kill both'`.
KILL ?=

# For the tests: more arguments, as in `make unit PYTEST='-k link -x'`.
PYTEST ?=

PACKAGES := frontend worker protocol deploy
TREE := build/tree/tokenwire
BIN := $(VENV)/bin

SETUP := VENV=$(VENV) scripts/setup.sh
DEMO_MODEL := $(BIN)/python scripts/demo_model.py
WITHOUT_ENGINE := tests/unit tests/contract tests/faults

# Without caches of compiled modules, an engine takes a minute longer to start.
export PYTHONDONTWRITEBYTECODE :=
export VENV CLIENTS_VENV

.DEFAULT_GOAL := help
.PHONY: help setup setup-sim setup-dev setup-clients run test check check-deploy check-ui lint fmt types unit \
	audit engine-test bench bench-capture bench-engine bench-peers bench-routing bench-scale bench-tokenizer bench-cores faults fuzz overload \
	resume-report soak soak-faults survive \
	kill-demo docs model tree lock clean check-observability compose-sim compose-cpu \
	check-images

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup:  ## Install tokenwire and its engine into .venv (EXTRA=cpu or gpu).
	@$(SETUP) $(EXTRA)

setup-sim:  ## Install tokenwire with the simulated engine alone: no torch.
	@$(SETUP)

setup-dev:  ## Install what tests and checks need.
	@$(SETUP) dev

setup-clients:  ## Install other people's clients, for the tests, into .venv-clients.
	@VENV=$(CLIENTS_VENV) scripts/setup.sh clients

model:  ## Build the demo model into the user's cache and print its path.
	@$(SETUP) model
	@$(DEMO_MODEL)

run:  ## Serve a model here: ENGINE HOST PORT PREFILL DECODE AGGREGATED FRONTENDS PROCESSES MODEL ...
	@case '$(RUN_HOST)' in ""|127.*|localhost|::1) ;; *) [[ -n $${TOKENWIRE_API_KEYS:-} ]] || { \
		echo 'make run: HOST=$(RUN_HOST) lets other machines in: set TOKENWIRE_API_KEYS to a file of keys' \
			'(tokenwire-keys api NAME), see docs/security.md' >&2; exit 2; } ;; esac
	@$(SETUP) $(if $(filter vllm,$(ENGINE)),$(EXTRA)) $(if $(MODEL),,model)
	@model='$(MODEL)'; [[ -n $$model ]] || model=$$($(DEMO_MODEL)); \
	exec $(BIN)/tokenwire-up --engine '$(ENGINE)' --model "$$model" --port '$(PORT)' \
		$(if $(RUN_HOST),--host '$(RUN_HOST)') \
		$(if $(SERVED_MODEL_NAME),--served-model-name '$(SERVED_MODEL_NAME)') \
		$(if $(PREFILL),--prefill '$(PREFILL)') \
		$(if $(DECODE),--decode '$(DECODE)') \
		$(if $(AGGREGATED),--aggregated '$(AGGREGATED)') \
		$(if $(FRONTENDS),--frontends '$(FRONTENDS)') \
		$(if $(PROCESSES),--processes '$(PROCESSES)') \
		$(if $(TOOL_CALL_PARSER),--tool-call-parser '$(TOOL_CALL_PARSER)') \
		$(if $(REASONING_PARSER),--reasoning-parser '$(REASONING_PARSER)') \
		$(if $(CAPTURE),--capture-hidden-states '$(CAPTURE)') \
		$(if $(LAYERS),--capture-layers '$(LAYERS)') \
		$(if $(ENGINE_ARGS),-- $(ENGINE_ARGS))

test: setup-clients  ## Run all tests, those on the real engine last.
	@$(SETUP) $(EXTRA) dev
	@export TOKENWIRE_DEMO_MODEL=$$($(DEMO_MODEL)); \
	$(BIN)/pytest $(WITHOUT_ENGINE) $(PYTEST); \
	$(BIN)/pytest -m engine $(PYTEST)

check-observability: setup-dev  ## Check dashboard, alerts, compose file and Dockerfile, with a real Prometheus.
	@model=$$($(DEMO_MODEL)); $(BIN)/python scripts/check_observability.py --model "$$model"

check-images: setup-dev  ## Take the Dockerfile's stages in a clean Debian, and serve from them; root, minutes.
	@$(BIN)/python scripts/check_images.py

compose-sim: setup-dev  ## Run the compose file's profile sim as processes, and serve a request.
	@model=$$($(DEMO_MODEL)); $(BIN)/python scripts/compose_here.py sim --model "$$model"

compose-cpu: setup-dev  ## The same of the profile cpu, on the real engine.
	@$(SETUP) cpu
	@model=$$($(DEMO_MODEL)); $(BIN)/python scripts/compose_here.py cpu --model "$$model"

check: lint types unit  ## All that a change must pass, without an engine.

check-deploy: setup-dev check-observability  ## Prove the Helm chart with the real helm; compose file, images, dashboard and alerts, too.
	@model=$$($(DEMO_MODEL)); $(BIN)/python scripts/check_deploy.py --model "$$model"

check-ui: setup-dev  ## Drive the live page in a browser (Debian's chromium).
	@$(SETUP) dev browser
	@scripts/chromium.sh
	$(BIN)/pytest -m browser tests/browser $(PYTEST)

lint: setup-dev  ## Check the style.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

audit: setup-dev  ## Look for known vulnerabilities of what is pinned.
	@$(BIN)/python scripts/audit.py

fmt: setup-dev  ## Mend the style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without an engine, pyright has nothing to say of what is made of its classes.
types: setup-dev tree  ## Check the types.
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python \
		$(if $(wildcard $(BIN)/vllm),,--project scripts/pyright_without_engine.json)

unit: setup-dev  ## Run unit, contract and fault tests, with branch coverage.
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(WITHOUT_ENGINE) $(PYTEST)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --omit='worker/vllm/*'  # that runs on a real engine only

engine-test: setup-clients  ## Run the tests on a real vLLM engine.
	@$(SETUP) $(EXTRA) dev
	@export TOKENWIRE_DEMO_MODEL=$$($(DEMO_MODEL)); $(BIN)/pytest -m engine $(PYTEST)

bench-capture: setup  ## Measure hidden-state capture beside bare vLLM on the real engine.
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/bench_capture.py

bench: setup-dev  ## Measure the frontend on simulated workers (BASELINE=checkout: against it).
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/bench.py \
		$(if $(BASELINE),--baseline '$(BASELINE)')

bench-engine: setup-dev  ## Measure the real engine through tokenwire beside vllm serve; KV-aware routing, too.
	@$(SETUP) $(EXTRA)
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/bench_engine.py \
		--output docs/benchmarks.md

bench-peers: setup-dev  ## Measure the frontend beside its peers (PEERS_SECONDS, PEERS_REPEATS, PEERS_ARMS).
	@$(SETUP) $(EXTRA)
	@scripts/survive_peers.sh
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/bench_peers.py

bench-cores: setup-dev  ## Measure a frontend of 1 and 2 processes, into docs/benchmarks.md.
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/bench_cores.py

bench-routing: setup-dev  ## Compare routing policies on simulated workers; into docs/routing.md.
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/bench_routing.py --write

bench-tokenizer: setup-dev  ## Measure messages to ids, and libraries for it; into docs/benchmarks.md.
	@model=$$($(DEMO_MODEL)); $(BIN)/python scripts/bench_tokenizer.py --model "$$model" --write

bench-scale: setup-dev  ## Measure routing and its index up to 1,000 workers; into docs/scale.md.
	@$(BIN)/python scripts/bench_scale.py --write

overload: setup-dev  ## Offer up to 10x the capacity, with and without the queue; into docs/overload.md.
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/overload.py $(OVERLOAD)

soak: setup-dev  ## Load a frontend for MINUTES (10); fail if its memory grows; STREAMS=5000 beside.
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/soak.py \
		--minutes $(or $(MINUTES),10) --streams $(or $(STREAMS),0)

soak-faults: setup-dev  ## The same for MINUTES (10) while workers are killed, stopped, restarted.
	@PYTHONPATH=tests $(BIN)/python scripts/soak_faults.py --minutes $(or $(MINUTES),10) \
		--seed $(or $(SEED),1)

fuzz: setup-dev  ## Fuzz a simulated pair for FUZZ_SECONDS (600); FUZZ='--seed 1 --rounds 1'.
	@model=$$($(DEMO_MODEL)); $(BIN)/python scripts/fuzz.py --model "$$model" $(FUZZ)

faults: setup-dev  ## Inject faults by SEED (1) in CASES (300); CASE=N runs one; WRITE=1 into docs.
	@PYTHONPATH=tests $(BIN)/python scripts/faults.py --seed $(or $(SEED),1) \
		--cases $(or $(CASES),300) $(if $(CASE),--case $(CASE)) $(if $(WRITE),--write) $(FAULTS)

resume-report: setup-dev  ## Break generations in every way, into docs/ (ENGINE=sim or vllm: one part).
	@$(SETUP) $(EXTRA)
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/resume_report.py --write \
		$(if $(filter file,$(origin ENGINE)),,--engine '$(ENGINE)')

survive: setup-dev  ## Hurt a real stack under load (STACK=tokenwire, vllm-router, dynamo).
	@$(SETUP) $(EXTRA)
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/survive.py \
		--stack $(or $(STACK),tokenwire)

kill-demo: setup-dev  ## Kill what serves a tool call, in its middle (KILL='--engine vllm').
	@$(SETUP) $(EXTRA)
	@model=$$($(DEMO_MODEL)); TOKENWIRE_DEMO_MODEL=$$model $(BIN)/python scripts/kill_demo.py $(KILL)

docs: setup-dev  ## Write what is made from the code: tables, the checkpoint's schema, the dashboard.
	@$(BIN)/python scripts/api_docs.py
	@$(BIN)/python scripts/dashboard.py
	@$(BIN)/python scripts/checkpoint_schema.py
	@$(BIN)/python scripts/config_docs.py
	@$(BIN)/python scripts/messages_docs.py
	@$(BIN)/python scripts/alert_docs.py
	@$(BIN)/python scripts/chart_values.py

# Type checkers do not follow import hooks: give them a real tokenwire/ folder.
tree: $(PACKAGES:%=$(TREE)/%)
$(TREE)/%:
	@mkdir -p $(TREE)
	@ln -sfn ../../../$* $@

lock:  ## Resolve pyproject.toml into requirements/*.lock (UPGRADE='NAME ...' or all: newest).
	@$(SETUP)
	@$(BIN)/python scripts/lock.py $(UPGRADE)

clean:  ## Remove what the others made here, but not the cached model.
	rm -rf .venv .venv-clients build dist *.egg-info .coverage .coverage.* .hypothesis \
		.mypy_cache .pytest_cache .ruff_cache
	find $(PACKAGES) scripts tests -name __pycache__ -prune -exec rm -rf {} +
