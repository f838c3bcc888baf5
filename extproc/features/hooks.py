"""The hooks of the enabled features: at each point, only those of features that have it."""

import logging
from collections.abc import Callable, Iterable, Sequence

from extproc.base.logs import log_fault
from extproc.features.feature import Feature

log = logging.getLogger("kvsteer.decision")


class Hooks:
    """The hooks of features, by their names; `Feature` says what each of them is.

    features: all of them. headers: those that any of them reads. wants_named: whether any wants
    requests to have these.
    """

    def __init__(self, features: Iterable[Feature] = ()) -> None:
        self.features = made = list(features)
        self.headers = [name for one in made for name in one.headers]
        self.wants_named = any(one.wants_named for one in made)
        self.describe = [one.describe for one in _with(made, "describe")]
        self.terms = [one.terms for one in _with(made, "terms")]
        self.dress = [one.dress for one in _with(made, "dress")]
        self.must_wait = [one.must_wait for one in _with(made, "must_wait")]
        self.begin = [one.begin for one in _with(made, "begin")]
        self.note_placed = [one.note_placed for one in _with(made, "note_placed")]
        self.extend = [one.extend for one in _with(made, "extend")]
        self.write = [one.write for one in _with(made, "write")]
        self.note_server = [one.note_server for one in _with(made, "note_server")]
        self.respond = [one.respond for one in _with(made, "respond")]
        self.note_end = [one.note_end for one in _with(made, "note_end")]
        self.note_stop = [one.note_stop for one in _with(made, "note_stop")]


def _with(features: Iterable[Feature], hook: str) -> list[Feature]:
    """Returns the features that have a hook of their own."""
    base = getattr(Feature, hook)
    return [one for one in features if getattr(type(one), hook) is not base]


NO_HOOKS = Hooks()


def tell(hooks: Sequence[Callable[..., None]], *values: object, **named: object) -> None:
    """Calls hooks that only take note; an error of one is logged, and affects nothing else."""
    for hook in hooks:
        try:
            hook(*values, **named)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            log_fault(log, "a feature failed with %s", error)
