"""Compiles the request path with mypyc, from the Python source, which remains the only one.

    python compile_path.py [DIRECTORY]

writes `extproc/compiled/` in the directory, by default beside the sources (`make compiled`). It
needs mypy, msgspec, prometheus-client and a C compiler, and takes a minute.
`extproc.running.request_path` uses the result only if it was built from exactly the installed
sources.
"""

import ast
import hashlib
import json
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = Path("extproc", "compiled")

# Modules that gain by it and that mypyc can compile. Others, and why: benchmarks/results.md.
MODULES = (
    "observing.decisions",
    "routing.claims",
    "routing.decision",
    "routing.eligibility",
    "routing.load",
    "routing.marks",
    "routing.placing",
    "routing.policies",
    "routing.query",
    "routing.ranks",
    "routing.sampling",
    "routing.claim_table",
    "routing.sessions",
    "routing.survey",
    "routing.upstreams",
    "serving.lean_call",
    "serving.stream_answers",
    "tokenizing.text_encoder",
)

# Libraries with base classes of these modules' classes. mypyc lays out a class according to its
# base: if the base were unknown, the process would crash at the first use of such an object.
LIBRARIES = ("msgspec", "prometheus_client")

# Not the project's own configuration, which is strict: without some libraries, as when images are
# built, it would report errors in modules that are only imported.
_MYPY = f"""\
[mypy]
explicit_package_bases = true
ignore_missing_imports = true
[mypy-extproc.pb.*,kvstate.pb.*]
ignore_errors = true
[mypy-{",".join(f"extproc.{name}" for name in MODULES)}]
disallow_subclassing_any = true
"""


def main() -> int:
    """Compiles the modules; returns 0, or 1 if a required package is missing."""
    missing = [name for name in ("mypyc", *LIBRARIES) if find_spec(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
        return 1
    into = Path(sys.argv[1] if len(sys.argv) > 1 else HERE) / FOLDER
    files = [f"extproc/{name.replace('.', '/')}.py" for name in MODULES]
    manifest = {
        "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
        "modules": [f"extproc.{name}" for name in MODULES],
        # hashed before compilation, so that an edit made meanwhile does not count as compiled
        "sources": {
            name: hashlib.sha256((HERE / name).read_bytes()).hexdigest()
            for name in sorted(_imported(files))
        },
    }
    with tempfile.TemporaryDirectory(prefix="kvsteer-compile-") as directory:
        built = _built(files, Path(directory))
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(built / "extproc", into)
    (into / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


def _built(files: list[str], directory: Path) -> Path:
    from mypyc.build import mypycify
    from setuptools import Distribution  # type: ignore[import-untyped]

    config = directory / "mypy.ini"
    config.write_text(_MYPY)
    extensions = mypycify(
        ["--config-file", str(config), *files],
        opt_level="2",
        debug_level="0",
        group_name="extproc.path",
        target_dir=str(directory / "c"),
    )
    build = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    build.build_lib, build.build_temp = str(directory / "lib"), str(directory / "objects")
    build.ensure_finalized()
    build.run()
    return directory / "lib"


def _imported(files: list[str]) -> set[str]:
    """Returns the files and all project files that they import, on which the result depends."""
    found: set[str] = set()
    waiting = list(files)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(_imports(name))
    return found


def _imports(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((HERE / name).read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for each in names:
            file = Path(*each.split(".")).with_suffix(".py")
            if each.partition(".")[0] in ("extproc", "kvstate") and (HERE / file).is_file():
                yield file.as_posix()


if __name__ == "__main__":
    sys.exit(main())
