# `make` lists the targets. Everything happens in .venv; nothing is installed elsewhere.
SHELL := /bin/bash
PYTHON ?= python3
UV_VERSION := 0.13.9
BENCH ?= wire bus streams sandbox inference loop
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTO := $(wildcard src/headrace/rpc/*.proto)

.DEFAULT_GOAL := help
.PHONY: help install demo online test check kafka-up kafka-down proto bench docs clean broker-needs redis-needs chaos

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(STAMP) ## .venv with all that requirements.lock pins (about 3 GB, once)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make install: expected Python 3.11 or later, got $$($(PYTHON) --version)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "make install: $(PYTHON) -m venv failed (on Debian: apt-get install python3-venv)"; exit 1; }
	@test -x $(BIN)/uv || { test -x $(BIN)/pip || $(BIN)/python -m ensurepip >/dev/null; \
		$(BIN)/python -m pip install -q --disable-pip-version-check "uv==$(UV_VERSION)"; }
	$(BIN)/uv pip install --system-certs --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --offline -e .
	@touch $@

demo: install ## train a small model on real code, live (BUS=kafka, RUN=DIR, ARGS="--minutes 30")
	$(BIN)/headrace demo $(if $(BUS),--bus $(BUS)) $(if $(RUN),--run-dir $(RUN)) $(ARGS)

online: install ## the same with simulated editors: live feedback and tasks, one trainer (BUS, RUN, ARGS="--plant nan")
	$(BIN)/headrace demo --online $(if $(BUS),--bus $(BUS)) $(if $(RUN),--run-dir $(RUN)) $(ARGS)

test: install broker-needs redis-needs ## all tests, the Kafka half against a real broker (ARGS for pytest)
	$(BIN)/python -m pytest $(ARGS)

chaos: install broker-needs ## kill processes of a real run at random, then check its log (MINUTES=2 SEED=7 BUS=kafka)
	cd tests && PYTHONPATH=. ../$(BIN)/python -m chaos $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED)) $(if $(BUS),--bus $(BUS)) $(ARGS)

check: install ## lint, format, types, imports, tidy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_tidy.py

kafka-up: install broker-needs ## start a local one-node Apache Kafka
	$(BIN)/headrace kafka up

kafka-down: install ## stop it
	$(BIN)/headrace kafka down

proto: install ## generate src/headrace/rpc/*_pb2* from the .proto files
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src --grpc_python_out=src $(PROTO)

bench: install ## the figures of benchmarks/ (BENCH="wire bus ..." chooses)
	@for name in $(BENCH); do $(BIN)/python -m benchmarks.$$name || exit 1; done

docs: install ## generated pages: docs/asyncapi.json, docs/settings.md
	$(BIN)/python -m headrace.wire.asyncapi > docs/asyncapi.json
	$(BIN)/python -m headrace.cli.settings_page > docs/settings.md

clean: ## build and test leftovers; keeps .venv, runs and the local broker
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A real Kafka needs Java and, once, Maven; the region's cache is tested on a real Redis. Where they can be had
# without asking, they are installed.
redis-needs:
	@if command -v redis-server >/dev/null; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "installing redis-server for the tests of the region's cache"; \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install -y --no-install-recommends redis-server >/dev/null; } \
			|| echo "it could not be installed: the tests on Redis will be left out"; \
	else echo "redis-server is not here: the tests that need it will be left out"; fi

broker-needs:
	@if test -n "$$HEADRACE_KAFKA" || { command -v java && command -v mvn; } >/dev/null; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "installing Java and Maven for the Kafka half"; \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install -y --no-install-recommends default-jre-headless maven >/dev/null; } \
			|| echo "they could not be installed: the Kafka half will be left out"; \
	else echo "Java and Maven are not both here: what needs a broker will be left out"; fi
