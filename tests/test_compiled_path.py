"""The compiled request path: what may be compiled, when it runs, and that it does the same."""

import ast
import builtins
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import msgspec
import pytest

import compile_path
from extproc.base import structs
from extproc.running.request_path import CompiledChoice, chosen
from tests.imports import MODULES, ROOT, tree_of
from tests.sanitize import copy_tree

COMPILED = [f"extproc.{name}" for name in compile_path.MODULES]

# The compiler that builds extensions for this Python.
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]

# Suites that run on the compiled path as they run on plain Python.
SUITES = (
    "tests/extproc/http2",
    "tests/extproc/routing",
    "tests/extproc/disaggregation",
    "tests/extproc/serving",
    "tests/extproc/tokenizing/test_text_encoder.py",
    "tests/extproc/commands/whatif",
    "tests/system/attacks/test_fuzz_frames.py",
    "tests/system/attacks/test_fuzz_messages.py",
)


def installed(here: Path, suffix: str = EXTENSION_SUFFIXES[0]) -> Path:
    """A folder `extproc` with one source that was compiled."""
    source = here / "extproc" / "one.py"
    (here / "extproc" / "compiled").mkdir(parents=True)
    source.write_text("ONE = 1\n")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    manifest = {"suffix": suffix, "modules": [], "sources": {"extproc/one.py": digest}}
    (here / "extproc" / "compiled" / "manifest.json").write_text(json.dumps(manifest))
    return source.parent


def test_compiled_modules_of_these_sources_are_chosen(tmp_path: Path) -> None:
    assert chosen(None, installed(tmp_path)) == CompiledChoice(is_compiled=True)


def test_plain_python_is_chosen_where_no_module_is_compiled(tmp_path: Path) -> None:
    assert str(chosen(None, tmp_path)) == "plain"


@pytest.mark.parametrize("change", ["ONE = 2\n", None])
def test_compiled_modules_of_other_sources_are_not_chosen(
    tmp_path: Path, change: str | None
) -> None:
    here = installed(tmp_path)
    (here / "one.py").unlink() if change is None else (here / "one.py").write_text(change)
    told = str(chosen(None, here))
    assert told == "plain: extproc/one.py has changed since it was compiled"


def test_plain_python_can_be_requested(tmp_path: Path) -> None:
    assert not chosen("plain", installed(tmp_path)).is_compiled


def test_compiled_modules_of_another_python_are_not_chosen(tmp_path: Path) -> None:
    here = installed(tmp_path, ".cpython-27-x86_64-linux-gnu.so")
    assert str(chosen(None, here)) == "plain: compiled for another Python"


@pytest.mark.parametrize("module", COMPILED)
def test_structs_of_compiled_modules_inherit_their_keywords(module: str) -> None:
    """mypyc ignores keywords: without such a base a value could be changed, but not hashed."""
    assert module in MODULES
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ClassDef) and node.keywords:
            (base,) = [ast.unparse(one) for one in node.bases]
            found = getattr(structs, base).__struct_config__
            said = {one.arg: ast.literal_eval(one.value) for one in node.keywords if one.arg}
            assert said == {name: getattr(found, name) for name in said}, node.name
            assert said.keys() == _set_by(found), node.name


def test_bases_of_compiled_classes_are_installed_where_they_are_compiled() -> None:
    """Where mypyc does not know a base, a process is killed at the first use of such an object."""
    bases = {base for module in COMPILED for base in _libraries_derived_from(module)}
    assert bases <= set(compile_path.LIBRARIES)
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    (listed,) = re.findall(r"for name in ([^;]+);", dockerfile)
    assert {name.replace("_", "-") for name in compile_path.LIBRARIES} <= set(listed.split())


def _libraries_derived_from(module: str) -> Iterator[str]:
    nodes = list(ast.walk(tree_of(module)))
    own = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    imported = {
        alias.asname or alias.name: node.module or ""
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes:
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            name = ast.unparse(base).partition("[")[0].partition(".")[0]
            top = imported.get(name, name).partition(".")[0]
            if top not in {"extproc", *own, *sys.stdlib_module_names, *dir(builtins)}:
                yield top


@pytest.mark.slow
def test_compile_path_refuses_an_unknown_base(tmp_path: Path) -> None:
    module = f"extproc.{compile_path.MODULES[0]}"
    config = tmp_path / "mypy.ini"
    config.write_text(compile_path._MYPY)
    source = tmp_path / f"{module.replace('.', '/')}.py"
    source.parent.mkdir(parents=True)
    source.write_text("from missing import Base\n\n\nclass Derived(Base):\n    pass\n")
    command = [sys.executable, "-m", "mypy", f"--config-file={config}", "--cache-dir=/dev/null"]
    run = subprocess.run(
        [*command, source.relative_to(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert 'Class cannot subclass "Base"' in run.stdout


def _set_by(config: msgspec.structs.StructConfig) -> set[str]:
    usual = msgspec.Struct.__struct_config__
    return {
        name for name in ("frozen", "gc", "eq") if getattr(config, name) != getattr(usual, name)
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C compiler here: {COMPILER}")
def test_compiled_path_passes_the_suites_of_the_plain_one(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    for package in ("kvstate", "extproc"):
        for core in (ROOT / package).glob("_core.*.so"):
            shutil.copy2(core, tmp_path / package)
    compiled = subprocess.run(
        [sys.executable, str(tmp_path / "compile_path.py")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "KVSTEER_REQUEST_PATH": "compiled",
    }
    check = (
        "from extproc.running.request_path import CHOICE; from extproc.serving import router;"
        " assert CHOICE.is_compiled, CHOICE"
    )
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=environment, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout-method=thread", *SUITES]  # reports where each thread hung
    # a file instead of a pipe, which a process left behind would keep open
    told = tmp_path / "told"
    with told.open("wb") as out:
        run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out)
        try:
            status = run.wait(900)
        except subprocess.TimeoutExpired:
            run.kill()
            status = run.wait()
    assert status == 0, told.read_text()[-6000:]
