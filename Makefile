# Everything happens in .venv, installed from hash-pinned requirements: first what the demo needs, and
# for everything else what the tests need as well.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTED := $(READY) $(VENV)/.tests
# This machine's C compiler; where there is none, one is installed in .venv.
COMPILER := $(shell command -v "$${CC:-cc}" || command -v gcc || command -v clang)
ZIG = $(abspath $(BIN))/python -m ziglang cc
# How many processes the tests run in: on two cores four are faster than three, because many tests wait.
WORKERS ?= 4
# The tests start some hundred processes, which need not compile the same modules each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test coverage slow alone gateways clients pictures explore docs lint types envoy-files stubs-check stubs counts sanitize lock image pins clean

demo: $(READY)
	$(BIN)/kvsteer demo $(ARGS)

test: $(TESTED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# The tests of pure modules, quick and slow, which have to reach every line and branch of them.
coverage: $(TESTED)
	$(BIN)/python -m pytest -m slow tests/test_pure_coverage.py $(ARGS)

# What takes long, mostly because it waits.
slow: $(TESTED)
	KVSTEER_EXAMPLES=thorough $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m '(slow or docker or engine) and not alone' $(ARGS)

# One after the other: those that measure how long others wait. Nothing else may run beside them.
alone: $(TESTED)
	KVSTEER_EXAMPLES=thorough $(BIN)/python -m pytest -m '(slow or docker or engine) and alone' $(ARGS)

# Real gateways in front of the router. Builds them first, with Go: minutes each, once. A gateway that cannot be built is
# skipped, with the reason.
gateways: $(TESTED)
	-$(BIN)/python -m tests.gateways.install
	$(BIN)/python -m pytest -m gateway tests/gateways $(ARGS)

# Real coding agents from npm, which are installed first: about a gigabyte, once. What needs vLLM's renderer is skipped without
# KVSTEER_VLLM_PYTHON.
clients: $(TESTED)
	-$(BIN)/python -m tests.clients.install
	$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

# The pictures in docs/, made anew from agents' traffic, in light and dark: eight minutes; needs chromium and chromedriver.
pictures: $(TESTED)
	$(BIN)/python -m tests.page.pictures docs

# The property tests with examples that no run before has had.
explore: $(TESTED)
	KVSTEER_EXAMPLES=explore $(BIN)/python -m pytest $(ARGS)

# The site in build/site; fails on a page that nothing leads to, and on a link that leads nowhere.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTED)
	$(BIN)/mypy
	$(BIN)/mypy benchmarks

stubs: $(TESTED)
	$(BIN)/python proto/generate.py

# The examples' Envoy configurations, as `kvsteer envoy` renders them, and the lists of removed headers in those that explain.
envoy-files: $(TESTED)
	$(BIN)/python -m tests.deploy.envoy_files

stubs-check: $(TESTED)
	$(BIN)/python proto/generate.py --check

COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-strip-extras
OURS = --no-emit-package kvsteer --no-emit-package kvsteer-tools pyproject.toml kvtools/pyproject.toml
# Pins the versions and hashes of everything installed (requirements.lock: in the image), without download addresses; needs uv.
lock:
	$(COMPILE) $(OURS) --extra envoy --extra fast --extra grpc --extra kubernetes --extra otel --extra sharing -o requirements.lock
	$(COMPILE) $(OURS) --all-extras --group dev -o requirements-dev.lock
	$(COMPILE) $(OURS) --extra demo --group build -c requirements-dev.lock -o requirements-demo.lock
	$(COMPILE) --group compiler -o requirements-compiler.lock
	$(COMPILE) --group docs -c requirements-dev.lock -o requirements-docs.lock

$(VENV)/.installed: requirements-demo.lock
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvsteer needs Python 3.11 or newer, this is %s; try: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "python3 has no venv package here; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(0 if pathlib.Path(sysconfig.get_path("include"), "Python.h").exists() else "the headers of Python are missing, with which kvsteer is built; on Debian: apt-get install python3-dev; `docker compose up` needs neither them nor a compiler")'
	@echo 'Installs what the demo needs in $(VENV), once: 270 MB, which takes half a minute or more, in silence.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-demo.lock
	@touch $@

$(VENV)/.tests: requirements-dev.lock | $(READY)
	@echo 'Installs what the tests need besides, once: 580 MB more, which takes a minute or more, in silence.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

$(VENV)/.docs: requirements-docs.lock | $(TESTED)
	@echo 'Installs what builds the site, once: 110 MB more, in silence.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-docs.lock
	@touch $@

# The work of one request, counted and compared with the counts of the commit.
counts: $(TESTED)
	$(BIN)/python benchmarks/extproc_counts.py --check

$(VENV)/.compiler: requirements-compiler.lock | $(VENV)/.installed
	@echo 'There is no C compiler here: installs one in $(VENV), once: 410 MB, in silence.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-compiler.lock
	@touch $@

# Builds the compiled cores. Debian's Python names options for its linker that Zig's refuses, so LDSHARED is set as well; what
# Zig keeps, lies where `make clean` finds it.
$(READY): $(VENV)/.installed $(if $(COMPILER),,$(VENV)/.compiler) pyproject.toml kvtools/pyproject.toml setup.py $(wildcard kvstate/native/*.[ch] extproc/native/*.[ch])
	$(if $(COMPILER),,CC='$(ZIG)' LDSHARED='$(ZIG) -shared' ZIG_GLOBAL_CACHE_DIR='$(abspath $(VENV))/zig-cache') $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable ./kvtools
	@touch $@

# The compiled cores under AddressSanitizer and UndefinedBehaviorSanitizer, built and tested in a copy.
sanitize: $(TESTED)
	$(BIN)/python tests/sanitize.py

# The container image, on the base image whose digest deploy/images.env has.
image:
	docker build -f deploy/Dockerfile -t kvsteer --build-arg PYTHON_IMAGE=$$(sed -n 's/^PYTHON_IMAGE=//p' deploy/images.env) $(ARGS) .

# Writes the digests that the registry has today into deploy/images.env; needs docker with buildx.
pins:
	@set -e; while IFS= read -r line; do case $$line in \
	  *=*@sha256:*) tag=$${line#*=}; tag=$${tag%@*}; \
	    digest=$$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$$tag"); \
	    echo "$${line%%=*}=$$tag@$$digest" ;; \
	  *) printf '%s\n' "$$line" ;; esac; done <deploy/images.env >deploy/images.env.new
	@mv deploy/images.env.new deploy/images.env

clean:
	rm -rf $(VENV) build dist *.egg-info
