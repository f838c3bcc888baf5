"""Whether a running Envoy sends requests on while the router is away, by its configuration dump.

Source: `envoy.admin.v3.ConfigDump` as JSON, where a default such as `failure_mode_allow: false` is
left out (`envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor`).
"""

from collections.abc import Mapping

import msgspec

from kvstate.undecodable import UNDECODABLE

_EXT_PROC = "ext_proc.v3.ExternalProcessor"

# Values of a dump that are looked at; a larger one says nothing.
_MAX_VALUES = 1_000_000


def fails_open(dump: bytes) -> bool:
    """Returns whether an ext_proc filter of this Envoy lets requests pass without the router.

    False if no filter is found, or the dump cannot be read: then nothing is known against it.
    """
    try:
        waiting: list[object] = [msgspec.json.decode(dump)]
    except UNDECODABLE:
        return False
    for _ in range(_MAX_VALUES):
        if not waiting:
            break
        one = waiting.pop()
        if isinstance(one, Mapping):
            is_filter = str(one.get("@type", "")).endswith(_EXT_PROC)
            if is_filter and one.get("failure_mode_allow") is True:
                return True
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return False
