# Shortcuts. Each target makes or takes the project's environment by scripts/env.sh, as scripts/test.sh does.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help check docs test bench image

PROFILE ?= gpu

help:
	@echo "make check                    ruff, format, mypy, docs"
	@echo "make docs [ARGS=--serve]      the documentation site, in build/site; --serve shows it on 127.0.0.1:8000"
	@echo "make test [ARGS=quick]         the checks, then all tests, the quick ones, or pytest with other ARGS"
	@echo "make bench                    list the benchmarks"
	@echo "make bench NAME=viewer [ARGS=...]   run one; ARGS=--help tells its options"
	@echo "make image [PROFILE=gpu] [EXTRAS=…] [BASE=…] [IMAGE=verl-tool:gpu] [ARGS=…]   a container image, by podman or docker"

check:
	source scripts/env.sh dev train && ruff check . && ruff format --check . && mypy && python scripts/build_docs.py

docs:
	source scripts/env.sh docs && python scripts/build_docs.py $(ARGS)

test:
	bash scripts/test.sh $(ARGS)

bench:
ifdef NAME
	source scripts/env.sh dev train && python benchmarks/$(NAME).py $(ARGS)
else
	@cd benchmarks && grep -l __main__ *.py | sed 's/\.py$$//'
endif

image:
	engine="$$(command -v podman || command -v docker)" || { echo "neither podman nor docker is installed" >&2; exit 1; }; \
	"$$engine" build --tag "$(or $(IMAGE),verl-tool:$(PROFILE))" $(if $(BASE),--build-arg "BASE=$(BASE)") \
	    --build-arg "PROFILE=$(PROFILE)" $(if $(EXTRAS),--build-arg "EXTRAS=$(EXTRAS)") $(ARGS) .
