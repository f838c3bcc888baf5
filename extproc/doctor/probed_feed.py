"""What a probe says of a feed, whatever its transport."""

from collections.abc import Iterator, Sequence

from extproc.config import Worker
from extproc.doctor.answers import judge_block_size
from extproc.doctor.findings import About, Finding
from extproc.doctor.heard import Heard
from extproc.doctor.http_visit import Visited
from extproc.doctor.listening import Listener
from extproc.doctor.means import Means
from extproc.doctor.probe import probe


async def judge_probe(
    means: Means, worker: Worker, visited: Visited, listeners: Sequence[Listener], about: About
) -> list[Finding]:
    """Probes every rank, one after the other; the first fault ends it."""
    if not visited.is_served:
        return [about.note("probe", "not made: the worker does not serve the model")]
    ranks = [one.heard.rank for one in listeners] if len(listeners) > 1 else [None]
    for rank in ranks:
        probed = await probe(means, worker, visited, listeners, rank)
        where = "" if rank is None else f" to rank {rank}"
        if probed.refused:
            return [about.wrong("probe-refused", probed.refused)]
        if not probed.heard and probed.elsewhere and not probed.by_engine:
            says = f"after a test request{where} blocks were stored, none of them with our tokens"
            return [about.wrong("tokens-differ", says)]
        if not probed.heard:
            says = f"a test request{where} was answered, and the feed did not announce its blocks"
            return [about.wrong("feed-silent", says)]
    return [about.right("probe", "the engine published the blocks of a test request")]


def judge_sizes(
    means: Means, worker: Worker, heard: Sequence[Heard], about: About
) -> Iterator[Finding]:
    """Whether the blocks that were heard of are as large as configured."""
    for size in sorted({size for one in heard for size in one.block_sizes}):
        yield judge_block_size(about, means.config, worker, size, "its events")
