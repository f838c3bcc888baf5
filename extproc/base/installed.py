"""Which version of KVSteer is installed."""

import os
import sys


def installed_version() -> str:
    """Returns the version; from the name of its folder, since Python's library for it is slow."""
    for place in sys.path:
        try:
            names = os.listdir(place or ".")  # noqa: PTH208 - pathlib takes longer to import
        except OSError:
            continue
        for name in names:
            if name.startswith("kvsteer-") and name.endswith(".dist-info"):
                return name.removeprefix("kvsteer-").removesuffix(".dist-info")
    from importlib.metadata import version

    return version("kvsteer")
