"""Generates the committed protobuf stubs, or checks that they are current.

    python proto/generate.py            rewrites them
    python proto/generate.py --check    exits 1 and names each stub that differs

The generator is the pinned grpcio-tools of requirements-dev.lock.
"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kvsteer_ext_proc.proto": "extproc/pb",
    "kvsteer_generate.proto": "extproc/pb",
    "kvsteer_health.proto": "extproc/pb",
    "kvsteer_kv_events.proto": "kvstate/pb",
}


def generate(proto: str, into: Path) -> None:
    """Writes the module and the type stub of one .proto file.

    Raises:
        SystemExit: protoc failed.
    """
    well_known = Path(protoc.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}"]
    arguments += [f"--python_out={into}", f"--pyi_out={into}", proto]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"{proto}: protoc failed")


def stale(proto: str, package: str) -> list[str]:
    """Returns the committed stubs of one .proto file that differ from newly generated ones."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(proto, Path(scratch))
        fresh = {path.name: path.read_bytes() for path in Path(scratch).iterdir()}
    committed = ROOT / package
    return [
        f"{package}/{name}"
        for name, content in sorted(fresh.items())
        if not (committed / name).exists() or (committed / name).read_bytes() != content
    ]


def main(arguments: list[str]) -> int:
    """Runs the command line above; returns its exit code."""
    if arguments == ["--check"]:
        differing = [path for proto, package in PACKAGES.items() for path in stale(proto, package)]
        for path in differing:
            print(f"{path}: not what proto/ generates; run: make stubs", file=sys.stderr)
        return 1 if differing else 0
    for proto, package in PACKAGES.items():
        generate(proto, ROOT / package)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
