"""Which routes rewrite paths so that the router does not recognize the requests.

Source: `prefix_rewrite`, `regex_rewrite` and `path_rewrite_policy` of
`envoy.config.route.v3.RouteAction`, and the path specifiers of `RouteMatch`.
"""

from collections.abc import Mapping
from typing import Any

from extproc.config.schema import Config
from extproc.requests.engine_paths import EnginePaths
from extproc.requests.request import PATHS

_VERSION = "/v1"

# The paths of an engine's API that routes are tried with.
_TRIED = [path for path in PATHS if path.startswith(f"{_VERSION}/")]

# Rewrites by rules of their own, which are not followed back to the client's path.
_UNCLEAR = ("regex_rewrite", "path_rewrite_policy")


def unrecognized(match: Mapping[str, Any], action: Mapping[str, Any], config: Config) -> str:
    """Returns what a route rewrites that the router does not recognize, and what to set; "" if
    nothing.

    match, action: the route's `match` and `route`.
    """
    paths = EnginePaths(config.extproc.path_prefixes, guesses=not config.edits_bodies)
    unclear = [key for key in _UNCLEAR if action.get(key)]
    if unclear:
        if not config.edits_bodies or config.extproc.path_prefixes:
            return ""
        return f"{unclear[0]} changes paths: name what it takes away in extproc.path_prefixes"
    to = action.get("prefix_rewrite")
    if not isinstance(to, str) or not to:
        return ""
    for wanted in _TRIED:
        path = _client_path(match, to, wanted)
        if path and paths.seen(path) != wanted:
            return f"prefix_rewrite changes {path} to {wanted}: {_what_to_set(path, wanted)}"
    return ""


def _client_path(match: Mapping[str, Any], to: str, wanted: str) -> str:
    """Returns the path that a route turns into the wanted one, "" if it turns none."""
    whole = match.get("path")
    if isinstance(whole, str):
        return whole if to == wanted else ""
    prefix = match.get("prefix") or match.get("path_separated_prefix")
    if not isinstance(prefix, str) or not wanted.startswith(to):
        return ""
    # clients write a slash behind the prefix, also where the route does not
    slash = "/" if to.endswith("/") and not prefix.endswith("/") else ""
    return prefix + slash + wanted.removeprefix(to)


def _what_to_set(path: str, wanted: str) -> str:
    for end in (wanted, wanted.removeprefix(_VERSION)):
        prefix = path.removesuffix(end)
        if path.endswith(end) and prefix.startswith("/"):
            return f"set extproc.path_prefixes: [{prefix}]"
    return "no setting finds that; let the end of the path stay as the engine's"
