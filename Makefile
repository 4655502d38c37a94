# make test      sets everything up, then lint, types and all tests
# make demo      sets everything up, then trains a small GPT with the entropy-aware head on two ranks
# make demo-fsdp sets everything up, then trains a small Llama of Hugging Face's, sharded by FSDP2
# make demo-grpo sets everything up, then teaches a small GPT by GRPO, without and with an entropy bonus
# make help      lists every target

PYTHON ?= python3
# One environment belongs to one Python: give another VENV along with another PYTHON.
VENV ?= .venv
# What to install. Pin them for a known combination: make test TORCH=torch==2.13.0 MEGATRON=megatron-core==0.16.1
TORCH ?= torch>=2.8
MEGATRON ?= megatron-core>=0.13

# PINNED=1 installs the very versions of requirements/, those that CI runs with: make test PINNED=1
PINNED ?=
ifneq ($(PINNED),)
PINS := requirements/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
ifeq ($(wildcard $(PINS)),)
$(error PINNED=1: there is no $(PINS); leave PINNED out, or take a Python that requirements/ has a file for)
endif
CONSTRAINT := --constraint $(PINS)
VERL_CONSTRAINT := --constraint requirements/verl.txt
endif

# Ranks of the demos: make demo NPROC=4 ARGS='--tensor-model-parallel-size 2'
NPROC ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Other pins than those installed are installed.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(TORCH) $(MEGATRON)$(PINNED:%= %)' | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help setup lint types pytest interpreter npu verl test compat demo demo-fsdp demo-grpo benchmark megatron-lm docs \
    format pins pins-verl audit coverage dist clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: $(STAMP) ## create $(VENV) and install the package, editable, with all that development needs

# pip's own choice of torch is, on Linux, a CUDA build of several GB. Where there is no NVIDIA GPU and pip's
# find-links folder (PIP_FIND_LINKS or pip.conf) holds a wheel that satisfies TORCH, a CPU build as a rule,
# that one is taken; otherwise pip decides. --no-compile: Python compiles what is imported, a small part.
$(STAMP): pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null || $(PIP) install --quiet --no-compile --no-index --no-deps $(CONSTRAINT) '$(TORCH)' 2>/dev/null || true
	$(PIP) install --no-compile $(if $(CI),--quiet) $(CONSTRAINT) '$(TORCH)' '$(MEGATRON)' --editable '.[dev]'
	@touch $@

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy
	$(BIN)/mypy

# Test processes; each starts ranks of its own. A file's tests stay in one: they share models and ranks.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

# ARGS goes to pytest or to the program: make pytest ARGS='-k entropy -x --numprocesses 0'
pytest: $(STAMP) ## the tests alone
	$(PYTEST) $(ARGS)

# The kernels of the Triton backend, program by program in numpy: slow, so the core's grid and their own tests.
# fp64 never goes to them.
interpreter: $(STAMP) ## the Triton backend's tests in Triton's interpreter, on the CPU
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter tests/unit/test_linear.py \
	    tests/unit/test_linear_rows.py tests/unit/test_logits.py tests/unit/test_logits_rows.py \
	    -m "not uninterpreted" -k "not float64" -W ignore::RuntimeWarning:triton $(ARGS)

# The correctness grid through the npu backend, with a stand-in for Ascend's operator on the CPU.
npu: $(STAMP) ## the npu backend on the correctness grid, one rank and several
	MCORE_ENTROPY_TEST_BACKEND=npu_fused $(PYTEST) tests/unit/test_linear.py \
	    tests/unit/test_linear_rows.py tests/unit/test_logits.py tests/unit/test_logits_rows.py \
	    tests/distributed/test_parity.py tests/distributed/test_collectives.py tests/distributed/test_errors.py \
	    -k "not float64" $(ARGS)

# verl as a whole wants vLLM and more: these are what the modules import that the tests go through. In an
# environment of its own, which sees the packages of $(VENV), so that no other test meets verl's pins.
VERL ?= verl==0.9.1
VERL_IMPORTS := codetiming datasets dill hydra-core omegaconf packaging pandas pyarrow pylatexenc ray \
    tensordict==0.10.0 torchdata

verl: $(VENV)-verl/.installed ## verl's functions and engines, verl's own package, on ours
	$(VENV)-verl/bin/python -m pytest --numprocesses $(JOBS) --dist loadfile tests/adapters/test_verl.py tests/adapters/test_verl_fsdp.py \
	    tests/adapters/test_verl_switch.py tests/distributed/test_verl.py tests/megatron/test_verl_engine.py \
	    tests/patches/test_verl.py $(ARGS)

$(VENV)-verl/.installed: $(STAMP)
	$(BIN)/python -m venv --clear $(VENV)-verl
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(VENV)-verl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(VENV)-verl/bin/python -m pip --disable-pip-version-check install --quiet --no-compile $(VERL_CONSTRAINT) $(VERL_IMPORTS)
	$(VENV)-verl/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps '$(VERL)'
	@touch $@

test: lint types pytest interpreter npu ## lint, types and all tests

# It makes its own environments, a small one for each version: docs/compatibility.md.
compat: ## the Megatron tests on every supported megatron-core: make compat ARGS='0.13.1 -k swap'
	$(PYTHON) -m tests.compatibility $(ARGS)

demo: $(STAMP) ## train a GPT on two tensor-parallel ranks
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) \
	    examples/pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel $(ARGS)

demo-fsdp: $(STAMP) ## train a Hugging Face Llama on two ranks with FSDP2, or ARGS='--parallel fsdp1' or ddp
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) \
	    examples/fsdp_llama.py $(ARGS)

# Two runs that differ in the bonus alone, and their plot: docs/grpo.md.
demo-grpo: $(STAMP) ## teach a GPT by GRPO on two tensor-parallel ranks, without and with an entropy bonus
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) \
	    examples/grpo_gpt.py --tensor-model-parallel-size 2 --save runs/grpo_gpt/without $(ARGS)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) \
	    examples/grpo_gpt.py --tensor-model-parallel-size 2 --save runs/grpo_gpt/with --target-entropy 0.6 $(ARGS)
	$(BIN)/python examples/grpo_report.py runs/grpo_gpt/without runs/grpo_gpt/with \
	    --labels 'no entropy bonus' 'target entropy 0.6' --output runs/grpo_gpt/plot.png

benchmark: $(STAMP) ## time and peak memory against eager
	$(BIN)/python -m tests.benchmarks.fused_head $(ARGS)

# make megatron-lm MEGATRON_LM=<unpatched checkout of a version in patches/>; docs/megatron_lm.md has its figures
megatron-lm: $(STAMP) ## Megatron-LM's own pretrain_gpt.py, patched, against the unpatched one, on the CPU
	$(PIP) install --quiet tensorboard six regex pydantic # what Megatron-LM's scripts import
	$(BIN)/python -m tests.patches.prove_on_cpu $(MEGATRON_LM)

format: $(STAMP) ## reformat, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# From what is installed, without the network: docs/testing.md says how the files are brought up to date.
pins: $(STAMP) ## write the versions installed in $(VENV) to requirements/
	$(BIN)/python requirements/pins.py

pins-verl: $(VENV)-verl/.installed ## the same for the environment of `make verl`
	$(VENV)-verl/bin/python requirements/pins.py verl

# pip-audit in an environment of its own: its requirements are not ours.
audit: $(VENV)-audit/.installed ## look the pinned versions up among the known vulnerabilities (needs the network)
	$(VENV)-audit/bin/python requirements/audit.py $(VENV)-audit/bin/pip-audit requirements/*.txt

$(VENV)-audit/.installed:
	$(PYTHON) -m venv --clear $(VENV)-audit
	$(VENV)-audit/bin/python -m pip --disable-pip-version-check install --quiet pip-audit
	@touch $@

# Every process of the tests counts, the spawned ranks too (tool.coverage in pyproject.toml). One test process:
# make coverage ARGS='tests/unit tests/distributed'
coverage: $(STAMP) ## lines and branches that the tests run, as a table and in runs/coverage/
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report

# Material says at length that MkDocs 2 will be another program; the requirements keep to this one.
docs: $(STAMP) ## the documentation's site, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site $(ARGS)

dist: $(STAMP) ## build the sdist and the wheel into dist/
	$(BIN)/python -m build

clean: ## remove caches and build outputs; environments stay
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
