"""Checks whether tenants are kept apart (`isolation`): the secret, the engines, and Envoy."""

from collections.abc import Iterator

from extproc.base.engine import SGLANG, VLLM, Engine
from extproc.base.errors import StartError
from extproc.base.secret_file import secret_in
from extproc.config.schema import Config
from extproc.config.sections import CLOSED
from kvtools.doctor.findings import Finding, Subject

CHECK = "isolation"

# The first releases whose events name salts: before, a tenant's blocks look like anybody's.
_FIRST_RELEASES = {VLLM: (0, 17), SGLANG: (0, 5, 18)}


def judge_secret(config: Config) -> Iterator[Finding]:
    """Yields whether the router can read the secret of its salts; nothing without isolation."""
    rules, about = config.isolation, Subject("configuration")
    if rules is None:
        return
    try:
        secret_in("isolation.secret_file", rules.secret_file)
    except StartError as error:
        yield about.wrong("isolation-secret", str(error))
        return
    yield about.right(CHECK, "isolation.secret_file can be read")
    if rules.fail != CLOSED:
        says = "while the router is away, Envoy sends requests without a salt: tenants share blocks"
        yield about.note(CHECK, f"{says} (isolation.fail: open)")


def judge_engine(config: Config, engine: Engine | None, about: Subject) -> Iterator[Finding]:
    """Yields whether a worker's engine keeps the tenants apart; nothing without isolation.

    engine: None if it is unknown.
    """
    if config.isolation is None:
        return
    if engine is None:
        says = "not checked: the worker does not tell its engine and release"
        yield about.note(CHECK, f"{says}; set `engine`, or embeddings may be refused")
        return
    first = _FIRST_RELEASES.get(engine.name)
    if first is None:
        yield about.wrong("isolation-engine", f"{engine.name} has no `cache_salt` in its API")
    elif engine.release < first:
        words = ".".join(map(str, first))
        says = f"{engine} has no salts in its events: {words} is the first"
        yield about.wrong("isolation-engine", says)
    else:
        yield about.right(CHECK, f"{engine} reads `cache_salt`, and its events name it")


def judge_failure_mode(config: Config, about: Subject, *, fails_open: bool) -> Iterator[Finding]:
    """Yields whether Envoy does what it should while the router is away.

    fails_open: whether ext_proc sets failure_mode_allow.
    """
    closed = config.isolation is not None and config.isolation.fail == CLOSED
    if closed and fails_open:
        says = "failure_mode_allow is true: while the router is down, tenants share blocks"
        yield about.wrong("envoy-fails-open", says)
    elif not closed and not fails_open:
        says = "failure_mode_allow is false: requests get 5xx while the router is down"
        yield about.wrong("envoy-fails-closed", says)
