"""Builds the compiled cores if there is a C compiler; everything else is in pyproject.toml.

Without a compiler the installation continues, and plain Python does the same work slower. The wheel
is then tagged py3-none-any, so as not to be mistaken for one with the compiled cores.
KVSTEER_CFLAGS adds compiler flags (the sanitizers of `make sanitize`).

KVSTEER_REPOSITORY, the web address of the publishing repository, gives the package its links, and
makes relative links of the README absolute; KVSTEER_REF is the tag that they name (default: main).
"""

import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# The folders of the sources, by the module that each becomes: the index, and the requests' framing.
CORES = {"kvstate._core": "kvstate/native", "extproc._core": "extproc/native"}


HERE = Path(__file__).resolve().parent


class OptionalBuild(build_ext):
    """Continues after a failed build, with one line instead of a traceback."""

    def build_extension(self, extension: Extension) -> None:
        """Builds a core, or prints why it was not built."""
        try:
            super().build_extension(extension)
        except Exception as error:  # noqa: BLE001 - whatever a platform's compiler does
            print(
                f"kvsteer: the compiled core {extension.name} was not built ({error});"
                " plain Python is used instead",
                file=sys.stderr,
            )
            others = self.distribution.ext_modules
            self.distribution.ext_modules = [one for one in others if one is not extension]


class HonestWheel(bdist_wheel):
    """Tags the wheel by what was built, not by what was planned."""

    def run(self) -> None:
        """Builds everything first, then the wheel with the tags that apply."""
        self.reinitialize_command("build_ext").inplace = False
        self.run_command("build")
        self.skip_build = True
        if not self.distribution.has_ext_modules():
            self.root_is_pure, self.py_limited_api = True, False
        super().run()


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
        optional=True,
    )
    for name, folder in CORES.items()
]

setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
    ext_modules=cores,
    cmdclass={"build_ext": OptionalBuild, "bdist_wheel": HonestWheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
