"""Builds the compiled cores; everything else is in pyproject.toml.

Without them nothing works, so an installation that cannot build them fails, and says what to do.
KVSTEER_CFLAGS adds compiler flags (the sanitizers of `make sanitize`).

KVSTEER_REPOSITORY, the web address of the publishing repository, gives the package its links, and
makes relative links of the README absolute; KVSTEER_REF is the tag that they name (default: main).
"""

import os
import re
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# The folders of the sources, by the module that each becomes: the index, and the requests' framing.
CORES = {"kvstate._core": "kvstate/native", "extproc._core": "extproc/native"}


HERE = Path(__file__).resolve().parent


class ToldBuild(build_ext):
    """Fails with one line that says what is missing, and the ways to it."""

    def build_extension(self, extension: Extension) -> None:
        """Builds a core."""
        try:
            super().build_extension(extension)
        except Exception as error:
            raise CompileError(lacking(extension.name, error)) from error


def lacking(core: str, error: Exception) -> str:
    """Returns why a core was not built, and what to do."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return (
            f"kvsteer: the headers of Python are missing ({header}), so its compiled core {core}"
            " cannot be built. On Debian: apt-get install python3-dev. `docker compose up` needs"
            " neither them nor a compiler."
        )
    return (
        f"kvsteer: its compiled core {core} was not built ({error}). It needs a C compiler. In a"
        " clone, `make demo` installs one; on Debian: apt-get install gcc libc6-dev. `docker"
        " compose up` needs none."
    )


REPOSITORY = os.environ.get("KVSTEER_REPOSITORY", "").rstrip("/")
REF = os.environ.get("KVSTEER_REF", "main")


def urls() -> dict[str, str]:
    """Returns the package's links, none if KVSTEER_REPOSITORY is not set."""
    if not REPOSITORY:
        return {}
    return {
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/{REF}/docs",
        "Changelog": f"{REPOSITORY}/blob/{REF}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }


def description() -> str:
    """Returns the README; with KVSTEER_REPOSITORY, its links and pictures are absolute."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({REPOSITORY}/{kind}/{REF}/{link[3]})"

    text = re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)", absolute, text)
    return re.sub(r'\b(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{REPOSITORY}/raw/{REF}/\2"', text)


cores = [
    Extension(
        name,
        sources=sorted(f"{folder}/{file.name}" for file in (HERE / folder).glob("*.c")),
        depends=sorted(str(file.relative_to(HERE)) for file in HERE.glob("*/native/*.h")),
        # no fused operations: figures have to be the same as in Python, to the last bit
        extra_compile_args=[
            "-std=c11",
            "-O3",
            "-ffp-contract=off",
            *os.environ.get("KVSTEER_CFLAGS", "").split(),
        ],
        py_limited_api=True,
    )
    for name, folder in CORES.items()
]

setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
    ext_modules=cores,
    cmdclass={"build_ext": ToldBuild},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
