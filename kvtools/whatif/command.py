"""`kvsteer whatif`: plays recorded requests with each policy, and prints the results."""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TextIO
from urllib.parse import urlsplit

import msgspec

from extproc.base.errors import RequestError, StartError
from extproc.commands.admin_client import ask_for
from extproc.commands.admin_json import Speed
from extproc.config.policies import POLICIES
from extproc.config.reader import load
from extproc.config.schema import Config, Model, Policy
from extproc.requests.dialect import NEWEST
from extproc.requests.request import parse, why_unkeyed
from extproc.tokenizing.tokens import Tokenizer
from kvstate.overlap import Tokens
from kvtools.whatif.engines import ModelledSpeed, Request, Result
from kvtools.whatif.envoy_policies import WITHOUT_SESSIONS
from kvtools.whatif.outlook import (
    IsolationCost,
    Measured,
    Results,
    Saving,
    as_json,
    doubt_of,
    least_workers,
    mean,
    measured_of,
    p90_of,
    svg,
    table,
)
from kvtools.whatif.routers import ENVOY, Arrivals, Contestant, Stage
from kvtools.whatif.routers import run as play
from kvtools.whatif.traces import (
    MAX_LINE_BYTES,
    RecordedRequest,
    Replay,
    Tokenize,
    Trace,
    block_tokens_of,
    names_sessions,
    requests_of,
)

_LEARNED = "learned"
_CACHE_TOKENS = 400_000
_USUAL_BLOCK_TOKENS, _MOST_BLOCK_TOKENS = 16, 128
_DECODE_RATE = 100.0
_TICK_SECONDS = 0.010

# Limits of --workers, --routers and --seeds; a real fleet has fewer workers and routers.
_MOST_WORKERS, _MOST_ROUTERS, _MOST_SEEDS = 1_024, 64, 100

_BAR = 30
_LOOK_SECONDS = 0.2


def _playable() -> list[str]:
    """Returns the policies that can be played: a recording has no headers."""
    return [name for name, policy in POLICIES.items() if not policy.reads_header]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="recordings, JSON lines; - is standard input")
    add(
        "--workers",
        type=_whole_number(_MOST_WORKERS),
        default=8,
        metavar="N",
        help="number of simulated workers",
    )
    add("--speed", type=_speed, default=ModelledSpeed().prefill_rate, metavar="TOKENS/S",
        help="prompt tokens that a worker computes in a second, or `learned`: as a running router"
        " has learned it")  # fmt: skip
    add("--admin", default="http://127.0.0.1:9090", metavar="URL",
        help="the admin server of that router")  # fmt: skip
    add("--decode", type=_positive, default=_DECODE_RATE, metavar="TOKENS/S",
        help="tokens per second of one answer")  # fmt: skip
    add("--cache-blocks", type=_whole_number(10**8), metavar="N",
        help="blocks of a worker's cache; by default room for 400,000 tokens")  # fmt: skip
    add("--block-size", type=_whole_number(65_536), metavar="TOKENS",
        help="tokens per block; by default as in the trace, or a part of it")  # fmt: skip
    add("--policy", action="append", choices=_playable(), metavar="NAME",
        help="play only this policy and Envoy's; may be repeated; by default all")  # fmt: skip
    add("--routers", type=_whole_number(_MOST_ROUTERS), default=1, metavar="N",
        help="number of routers that share")  # fmt: skip
    add("--rate", type=_positive, default=1.0, metavar="X",
        help="play X times as fast as recorded")  # fmt: skip
    add("--seeds", type=_whole_number(_MOST_SEEDS), default=3, metavar="N",
        help="runs of each policy, with different random seeds")  # fmt: skip
    add("--first", type=_whole_number(10**9), metavar="N", help="play only the first N requests")
    add("--model", metavar="NAME", help="the model whose requests are played")
    add(
        "--config",
        metavar="FILE",
        help="the router's configuration: its policy and tokenizers are used",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer for requests with bodies, like models[].tokenizer",
    )
    add("--arrivals", type=_positive, metavar="RATE",
        help="requests per second, evenly spaced, for lines without a time")  # fmt: skip
    add("--answer-tokens", type=_whole_number(10**6), default=128, metavar="N",
        help="length of answers whose length is not recorded")  # fmt: skip
    add("--new-answers", action="store_true",
        help="do not treat an answer as part of the prompt that follows it")  # fmt: skip
    add("--tenants", action="store_true",
        help="say what it costs if only lines of one `tenant` or `user` share blocks")  # fmt: skip
    add("--svg", type=Path, metavar="FILE", help="draw TTFT p90 by policy and number of workers")
    add("--json", action="store_true", help="print the results as JSON")


def _whole_number(most: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be from 1 to {most}, is {text!r}")
        return int(text)

    return parsed


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, is {text!r}")
    return found


def _speed(text: str) -> float | str:
    return text if text == _LEARNED else _positive(text)


def run(arguments: argparse.Namespace, out: TextIO | None = None) -> int:
    """Plays the requests, prints the results, and returns the exit status.

    Raises:
        StartError: a file cannot be read, or has an invalid line.
        ConfigError: the file of --config has faults.
    """
    out = sys.stdout if out is None else out
    config = None if arguments.config is None else load(arguments.config)
    recorded, left_out = recording_of(arguments, config)
    plan, measured = plan_of(arguments, config, recorded), measured_of(recorded)
    with Runs(plan.arrivals, len(recorded) * arguments.seeds, sys.stderr) as runs:
        found = _played(plan, runs, arguments.workers)
        doubt = doubt_of(found, measured, ENVOY)
        spared = None if doubt else _find_saving(plan, runs, arguments.workers, found)
        drawn = {arguments.workers: found}
        if arguments.svg is not None:
            for count in _fewer(arguments.workers, spared and spared.least):
                drawn[count] = _played(plan, runs, count)
    cost = _isolation_of(arguments, config, recorded, found) if arguments.tenants else None
    says = str(spared) if spared else f"How many workers fewer would do is not said: {doubt}."
    if arguments.json:
        fewest = {**(spared._asdict() if spared else {}), "sentence": says}
        result = _result_as_json(plan, found, measured, fewest)
        result["workers"] = arguments.workers
        if cost is not None:
            result["isolation"] = cost.as_json()
        print(json.dumps(result, indent=1), file=out)
    else:
        print(_describe(plan, arguments, recorded, left_out), file=out)
        print(f"\n{table(found, measured)}\n\n{says}", file=out)
        if cost is not None:
            print(cost, file=out)
    if arguments.svg is not None:
        _draw(arguments.svg, drawn)
    return 0


class Plan(NamedTuple):
    """What is played, and how.

    speed: of each worker. source: where its prefill rate comes from, in words.
    """

    arrivals: Arrivals
    contestants: Sequence[Contestant]
    speed: ModelledSpeed
    source: str
    cache_blocks: int
    block_tokens: int
    seeds: int

    def stage(self, workers: int) -> Stage:
        """Returns the stage with this number of engines."""
        speeds = [self.speed] * workers
        return Stage(speeds, self.cache_blocks, block_tokens=self.block_tokens)


def _isolation_of(
    arguments: argparse.Namespace,
    config: Config | None,
    recorded: Sequence[RecordedRequest],
    found: Results,
) -> IsolationCost:
    """Plays the first policy with tenants apart; returns what that costs.

    found: the results with blocks that all tenants share.
    """
    tenants = {one.tenant for one in recorded}
    apart = plan_of(arguments, config, recorded, isolates=True)
    ours = apart.contestants[:1]
    with Runs(apart.arrivals, len(recorded) * arguments.seeds, sys.stderr) as runs:
        runs.plan(1)
        played = runs.play(apart.stage(arguments.workers), ours, apart.seeds)
    name = ours[0].name
    return IsolationCost(name, len(tenants - {""}), mean(found[name]), mean(played[name]))


def plan_of(
    arguments: argparse.Namespace,
    config: Config | None,
    recorded: Sequence[RecordedRequest],
    *,
    isolates: bool = False,
) -> Plan:
    """Returns what is played: the arrivals, and on which fleets by which policies.

    isolates: whether only requests of one tenant share blocks.
    """
    size = arguments.block_size or block_tokens_of(
        recorded, _USUAL_BLOCK_TOKENS, _MOST_BLOCK_TOKENS
    )
    continues = not arguments.new_answers
    replay = Replay(size, arguments.rate, arguments.answer_tokens, continues, isolates)
    try:
        requests = requests_of(recorded, replay)
    except ValueError as error:
        raise StartError(f"whatif: {error}") from None
    rules = Policy() if config is None else config.policy
    prefill_rate, source = _rate(arguments)
    usual = ModelledSpeed()
    speed = ModelledSpeed(
        prefill_rate,
        usual.chunk_tokens,
        1 / arguments.decode,
        usual.request_seconds,
        usual.max_running,
    )
    return Plan(
        Arrivals(requests),
        [
            *_contestants(arguments.policy or _playable(), rules, arguments.routers),
            *(Contestant(name, name) for name in _free(requests)),
        ],
        speed,
        source,
        arguments.cache_blocks or _CACHE_TOKENS // size,
        size,
        arguments.seeds,
    )


def _contestants(names: Sequence[str], rules: Policy, routers: int) -> list[Contestant]:
    ours = Contestant(
        "",
        "",
        rules,
        prefill_rate=rules.cost.prefill_tokens_per_second,
        routers=routers,
        tick_seconds=_TICK_SECONDS if routers > 1 else 0.0,
    )
    return [
        ours._replace(name=name, policy=name, expects=True, learns=rules.learn)
        for name in dict.fromkeys(names)
    ]


def _free(requests: Sequence[Request]) -> Sequence[str]:
    """Returns Envoy's policies; those by session only if a session has more than one request."""
    sessions = [one.session for one in requests if one.session]
    return ENVOY if len(sessions) > len({*sessions}) else WITHOUT_SESSIONS


class _Worker(msgspec.Struct):
    """What is needed of a worker in GET /workers."""

    speed: Speed


def _rate(arguments: argparse.Namespace) -> tuple[float, str]:
    """Returns a worker's prompt tokens per second, and where the figure comes from."""
    if arguments.speed != _LEARNED:
        is_given = arguments.speed != ModelledSpeed().prefill_rate
        return arguments.speed, "as given" if is_given else "assumed"
    workers = ask_for(list[_Worker], "whatif", arguments.admin, "/workers")
    known = [one.speed.tokens_per_second for one in workers if one.speed.confidence > 0]
    if not known:
        raise StartError(f"whatif: {arguments.admin}: no worker's speed has been learned yet")
    return statistics.median(known), f"learned, the median of {len(known)} workers"


def recording_of(
    arguments: argparse.Namespace, config: Config | None
) -> tuple[Sequence[RecordedRequest], int]:
    """Returns the requests of the trace, and how many of its lines were left out."""
    gap = None if arguments.arrivals is None else 1 / arguments.arrivals
    trace = Trace(_tokenize(arguments, config), arguments.model, gap)
    for name in arguments.traces:
        try:
            if name == "-":
                trace.read("standard input", _lines(sys.stdin.buffer))
            else:
                with Path(name).open("rb") as file:
                    trace.read(name, _lines(file))
        except OSError as error:
            raise StartError(f"whatif: {name}: {error.strerror}") from None
        except ValueError as error:
            raise StartError(f"whatif: {error}") from None
    recorded = trace.requests[: arguments.first]
    if not recorded:
        raise StartError(f"whatif: {', '.join(arguments.traces)}: no request in it to play")
    return recorded, trace.skipped


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields lines; one that is too long comes in pieces of `MAX_LINE_BYTES` + 1 bytes."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


def _tokenize(arguments: argparse.Namespace, config: Config | None) -> Tokenize | None:
    """Returns a function that tokenizes requests with bodies; None if no tokenizer is named."""
    path = arguments.tokenizer
    if path is None and config is not None:
        named = [one for one in config.models if arguments.model in (None, one.name)]
        model = next((one for one in named if isinstance(one.tokenizer, str)), None)
    else:
        model = None if path is None else Model(arguments.model or "model", tokenizer=path)
    tokenizer = None if model is None else Tokenizer.load(model)
    if tokenizer is None:
        return None

    def tokens(path: str, body: bytes) -> Tokens:
        path = urlsplit(path).path
        if why_unkeyed("POST", path):
            raise RequestError("not_inference")
        request = parse(path, body, lambda _: NEWEST)
        if len(request.prompts) != 1:
            raise RequestError("several_prompts")
        return request.truncate(tokenizer.encode(request.prompts[0]))

    return tokens


class Runs:
    """Plays on all cores, and shows the progress if `err` is a terminal.

    arrivals: those of every run. weight: how many requests all runs of one policy with one number
    of workers play.
    """

    def __init__(self, arrivals: Arrivals, weight: int, err: TextIO) -> None:
        self._weight = weight
        self._err = err
        self._began_at = time.monotonic()
        self._planned = 0
        self._drawn = ""
        # forked from a process with threads, a child may inherit a lock that nobody releases; a
        # fork server needs a directory for its socket, which a read-only container lacks
        start = multiprocessing.get_context("spawn")
        self._finished = start.Value("Q", 0)
        given = (arrivals, self._finished)
        self.pool = ProcessPoolExecutor(
            os.cpu_count(), mp_context=start, initializer=_inherit, initargs=given
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        if self._drawn:
            self._err.write("\r\x1b[K")
            self._err.flush()

    def plan(self, policies: int) -> None:
        """Adds runs of so many policies to those that the progress line expects."""
        self._planned += policies * self._weight

    def play(
        self, stage: Stage, contestants: Sequence[Contestant], seeds: int
    ) -> dict[str, list[Result]]:
        """Returns the results of each contestant by name, one for each seed.

        Raises:
            StartError: a process was killed, most likely for lack of memory.
        """
        try:
            jobs = [
                self.pool.submit(_play, stage, one, seed)
                for one in contestants
                for seed in range(seeds)
            ]
            waiting: set[Future[Result]] = set(jobs)
            while waiting:
                waiting = wait(waiting, _LOOK_SECONDS).not_done
                self._show()
            found = [one.result() for one in jobs]
        except BrokenProcessPool:
            reason = "a process that played was killed; is there too little memory?"
            raise StartError(f"whatif: {reason} --first plays fewer requests") from None
        return {
            one.name: found[number * seeds : (number + 1) * seeds]
            for number, one in enumerate(contestants)
        }

    def _show(self) -> None:
        if not self._err.isatty():
            return
        share = min(1.0, self._finished.value / max(1, self._planned))
        seconds = time.monotonic() - self._began_at
        bar = "#" * round(share * _BAR)
        self._drawn = f"[{bar:{_BAR}}] {share:4.0%}  {seconds:.0f} s"
        self._err.write(f"\r{self._drawn}\x1b[K")
        self._err.flush()


_inherited: list[tuple[Arrivals, Any]] = []


def _inherit(arrivals: Arrivals, done: Any) -> None:
    _inherited.append((arrivals, done))


def _play(stage: Stage, contestant: Contestant, seed: int) -> Result:
    arrivals, done = _inherited[-1]
    before = 0

    def notify(count: int) -> None:
        nonlocal before
        with done.get_lock():
            done.value += count - before
        before = count

    found = play(stage, contestant, arrivals, seed, notify)
    notify(len(arrivals.requests))
    return found


def _played(plan: Plan, runs: Runs, workers: int) -> Results:
    runs.plan(len(plan.contestants))
    return runs.play(plan.stage(workers), plan.contestants, plan.seeds)


def _find_saving(plan: Plan, runs: Runs, workers: int, found: Results) -> Saving:
    """Finds how few workers suffice for the first policy to match Envoy's best one with all."""
    ours = plan.contestants[0]
    best = min((name for name in ENVOY if name in found), key=lambda name: p90_of(found[name]))
    goal = p90_of(found[best])
    runs.plan(max(0, math.ceil(math.log2(workers))))

    def suffices(count: int) -> bool:
        if count == workers:
            return p90_of(found[ours.name]) <= goal
        played = runs.play(plan.stage(count), [ours], plan.seeds)
        return p90_of(played[ours.name]) <= goal

    return Saving(ours.name, best, workers, goal, least_workers(workers, suffices))


def _fewer(workers: int, least: int | None) -> list[int]:
    """Returns the smaller numbers of workers that are drawn too, the largest first."""
    wanted = {least or workers, round(workers * 0.75), round(workers * 0.5)}
    return sorted(wanted - {0, workers}, reverse=True)


def _describe(
    plan: Plan, arguments: argparse.Namespace, recorded: Sequence[RecordedRequest], left_out: int
) -> str:
    """Returns in words what is played, and which parts of it are assumed."""
    speed, size = plan.speed, plan.block_tokens
    seconds = recorded[-1].at / arguments.rate
    tokens = sum(one.tokens for one in recorded)
    unknown = sum(1 for one in recorded if not one.answer_tokens)
    blind = sum(
        1 for one in recorded if one.hashes is None and one.prompt is None and not one.session
    )
    runs = "1 run" if plan.seeds == 1 else f"{plan.seeds} runs"
    played = (
        f"{len(recorded)} requests in {seconds:.0f} s, {tokens} prompt tokens;"
        f" {arguments.workers} simulated workers, {runs} of each policy."
    )
    worker = (
        f"A worker computes {speed.prefill_rate:g} prompt tokens a second ({plan.source}), one\n"
        f"prompt after the other in chunks of {speed.chunk_tokens}; an answer alone has"
        f" {1 / speed.step_seconds:g} tokens a second;\n"
        f"its cache has {plan.cache_blocks} blocks of {size} tokens. This is no model of your"
        " engine: compare policies by it,\n"
        "and believe its times only as far as those that are recorded agree with them."
    )
    lines = [played, worker]
    if left_out:
        lines.append(f"{left_out} lines are not played: no tokens, or of another model.")
    if unknown:
        says = f"{unknown} lines do not tell how long their answer was"
        lines.append(f"{says}: {arguments.answer_tokens} tokens are assumed.")
    if not names_sessions(recorded) and len(_free(plan.arrivals.requests)) > len(WITHOUT_SESSIONS):
        lines.append(
            "No line names a session: Envoy's policies by session keep requests together that\n"
            "continue each other, as if clients named them."
        )
    if blind:
        lines.append(f"{blind} lines do not tell what they share: nothing is assumed to be shared.")
    return "\n".join(lines)


def _result_as_json(
    plan: Plan, found: Results, measured: Measured, fewest: dict[str, Any]
) -> dict[str, Any]:
    return {
        "requests": len(plan.arrivals.requests),
        "prefill_tokens_per_second": plan.speed.prefill_rate,
        "prefill_source": plan.source,
        "block_size": plan.block_tokens,
        "cache_blocks": plan.cache_blocks,
        "policies": as_json(found),
        "recorded": {name: one._asdict() for name, one in measured.items()},
        "fewest_workers": fewest,
    }


def _draw(file: Path, drawn: dict[int, Results]) -> None:
    names = list(next(iter(drawn.values())))
    cells = {
        f"{count} workers": {name: max(1e-3, mean(each).p90) for name, each in found.items()}
        for count, found in sorted(drawn.items(), reverse=True)
    }
    try:
        file.write_text(svg(cells, names))
    except OSError as error:
        raise StartError(f"whatif: {file}: {error.strerror}") from None
