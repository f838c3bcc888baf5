"""How requests tell an engine their priority: in a header, or in a field of the body.

An engine uses it only if it schedules by priority (vLLM's `--scheduling-policy priority`, SGLang's
`--enable-priority-scheduling`). With vLLM the lower number goes first, with SGLang the higher one.
"""

from typing import NamedTuple

from extproc.base.engine import SGLANG, VLLM, Engine, Release

PRIORITY_FIELD = "priority"

# Within a class, who came first goes first, and each second that a prompt takes counts as if the
# request had come so many seconds later.
SECONDS_OF_PREFILL = 10.0

# The priorities of a class are so many, from the configured one: tenths of seconds since 2026.
CLASS_RANGE = 2**32
EPOCH_SECONDS = 1_767_225_600.0

_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


class PriorityPin(NamedTuple):
    """How requests on some paths name their priority to the releases of an engine.

    since: the first of them. sign: -1 where the higher number goes first.
    """

    engine: str
    since: Release
    paths: tuple[str, ...]
    in_body: bool
    sign: int = 1


# The last row that fits counts. Sources: the request models of vLLM 0.10.2 to 0.32, and the callers
# of `_get_priority` in its servers (vllm#51023; messages are answered by its chat completions);
# serving_chat.py, serving_completions.py and io_struct.py of SGLang 0.5.9 and 0.5.23 (its responses
# have the field and do not pass it to the scheduler).
_ROWS = (
    PriorityPin(VLLM, Release(0, 10, 2), (*_COMPLETIONS, "/v1/responses"), True),
    PriorityPin(VLLM, Release(0, 32), ("/v1/embeddings", "/inference/v1/generate"), True),
    PriorityPin(VLLM, Release(0, 28), (*_COMPLETIONS, "/v1/responses", "/v1/messages"), False),
    PriorityPin(SGLANG, Release(0, 5, 9), (*_COMPLETIONS, "/generate"), True, -1),
)


# The APIs of which people ask whether they have a priority.
_APIS = (*_COMPLETIONS, "/v1/responses", "/v1/messages")


def apis_without_priority(engine: Engine) -> list[str]:
    """Returns the paths of the usual APIs on which an engine reads no priority."""
    return [path for path in _APIS if priority_pin(engine, path) is None]


def priority_pin(engine: Engine, path: str) -> PriorityPin | None:
    """Returns how requests on a path name their priority to an engine; None if it reads none."""
    found = None
    for row in _ROWS:
        if row.engine == engine.name and row.since <= engine.release and path in row.paths:
            found = row
    return found


def priority_within(priority: int, wall_seconds: float, prefill_seconds: float) -> int:
    """Returns the priority of a request within its class; lower ones go first.

    priority: of the class, from 0 on. wall_seconds: when it came, since 1970, so that routers
    agree. prefill_seconds: for which its worker computes its prompt.
    """
    seconds = wall_seconds - EPOCH_SECONDS + SECONDS_OF_PREFILL * prefill_seconds
    return priority * CLASS_RANGE + min(CLASS_RANGE - 1, max(0, int(10 * seconds)))
