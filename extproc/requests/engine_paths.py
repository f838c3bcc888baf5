"""The paths that engines see, where the proxy rewrites those that clients use.

Envoy rewrites a path after it has asked the router: `prefix_rewrite`, `regex_rewrite` and
`path_rewrite_policy` of `envoy.config.route.v3.RouteAction`. KServe's LLMInferenceService is
reached under /NAMESPACE/NAME, Azure's API under /openai/deployments/NAME.
"""

from collections.abc import Sequence

from extproc.requests.request import PATHS

_VERSION = "/v1"

# Paths of OpenAI's API that other makers serve without a version before them.
_SHORT = ("/chat/completions", "/completions", "/embeddings")

# How paths begin that lack the version behind a configured prefix.
_UNVERSIONED = tuple(
    f"{path.removeprefix(_VERSION)}/" for path in PATHS if path.startswith(_VERSION)
)

# What the path of a call may end with, and the path that its engine sees. A path of one word, such
# as /generate, is no sign of an engine: any service may have it.
_ENDS = {path: path for path in PATHS if path.count("/") > 1} | {
    path: _VERSION + path for path in _SHORT
}


class EnginePaths:
    """Finds the path that the engine sees of a request.

    prefixes: `extproc.path_prefixes`. guesses: whether a path that ends like a known one is taken
    for it. A wrong guess costs a pick; where bodies are edited by their paths it could leave one
    unedited, so there only the configured prefixes count.
    """

    def __init__(self, prefixes: Sequence[str] = (), *, guesses: bool = True) -> None:
        whole = {prefix.removesuffix("/") for prefix in prefixes}
        self._prefixes = sorted(whole, key=len, reverse=True)
        self._ends = tuple(_ENDS) if guesses else ()

    def seen(self, path: str) -> str:
        """Returns the path that the engine sees: the same one, unless it is known to be rewritten.

        path: of a request, as `path_of` returns it.
        """
        for prefix in self._prefixes:
            rest = path.removeprefix(prefix)
            if rest != path and rest.startswith("/"):
                return _VERSION + rest if f"{rest}/".startswith(_UNVERSIONED) else rest
        if self._ends and path.endswith(self._ends):
            return next(known for end, known in _ENDS.items() if path.endswith(end))
        return path
