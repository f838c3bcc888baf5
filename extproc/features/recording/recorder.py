"""Records requests without their prompts, one JSON line each, in the format of Mooncake's trace.

A line has the time of the request, the lengths of its prompt and its answer, and a number for each
block of the prompt; if the prompt's tokens are not known, the length that the engine reported, and
a number for its conversation. If headers name the client's session or the tenant, there are numbers
for these, too: those of the prompts leave out the salts of tenants, so that a play can tell what
they have in common. The numbers are keyed with a secret that is drawn when the router starts and
never written: prompts that are equal up to a block's end have equal numbers, and nobody without the
secret can test what the prompt was.

The event loop only puts requests into a queue. A thread hashes, writes, and starts a new file when
the old one is old or large; older ones are kept within the same limits. Requests that it cannot
keep up with, or cannot write, are counted instead of recorded.
"""

import contextlib
import logging
import math
import os
import secrets
import stat
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.base.shares import Shares
from extproc.config.sections import RecorderSettings as Settings
from extproc.observing.outcomes import Outcome
from extproc.requests.tenant_salt import Tenant
from extproc.routing.decision import Decision, Verdict
from extproc.routing.health.statuses import FIRST_FAILURE
from extproc.routing.savings.belonging import Belonging
from kvstate.overlap import Prompt

log = logging.getLogger("kvsteer.recorder")

# The variable by which the processes of one router get a common secret, in hexadecimal digits.
SECRET_VARIABLE = "KVSTEER_RECORDER_SECRET"  # noqa: S105 - its name
_SECRET_BYTES = 32

# A block's number has 48 bits, so that every JSON parser can represent it.
_NUMBER_BYTES = 6

FLUSH_SECONDS = 0.25

# Most requests, and most prompt tokens, that wait for the thread; and most requests in flight.
MAX_QUEUED = 16_384
MAX_QUEUED_TOKENS = 16 * 1024 * 1024
MAX_OPEN = 65_536

# Suffix of the older files: FILE.old is the latest, then FILE.old.2 and so on.
OLDER = ".old"
MAX_OLDER = 8

# How long closing waits for the thread to write the rest.
_CLOSE_SECONDS = 2.0

# Largest size of a line without its numbers, and of each number.
_LINE_BYTES, _ID_BYTES = 1024, 16

# Who placed a request that was not steered.
PROXY = "proxy"

# Why a request is not recorded.
REASONS = ("queue_full", "disk", "no_tokens", "several_prompts", "failed")

# Requests with other verdicts are answered by the router itself.
_SERVED = (Verdict.STEER, Verdict.NO_OVERRIDE)


class Line(msgspec.Struct, omit_defaults=True):
    """One recorded request.

    timestamp: milliseconds since the file was started at `began` (seconds since 1970).
    output_length: tokens, 0 if unknown. hash_ids: one number for each block of block_size tokens;
    the last block may be shorter. Without known tokens it is left out, input_length is what the
    engine reported, and session is a number that the requests of one conversation have in common;
    "" if it is not known to be one. cached_length: cached prompt tokens that the engine reported.
    ttft_ms: time to the first token, of answers that are streamed: the first byte of others comes
    with their last token. Both are left out if unknown. tenant: stands for whose request it is, ""
    if that is not known. session_header: stands for the session that the
    client names in a header, "" if it names none. placed_by: the policy that placed it, `PROXY` if
    the proxy chose.
    """

    timestamp: int
    input_length: int
    output_length: int
    block_size: int
    began: float
    model: str
    hash_ids: list[int] | None = None
    session: str = ""
    cached_length: int | None = None
    ttft_ms: int | None = None
    tenant: str = ""
    session_header: str = ""
    placed_by: str = ""


def drawn_secret(environment: Mapping[str, str]) -> bytes:
    """Returns the parent process's secret, or a new one."""
    with contextlib.suppress(ValueError):
        given = bytes.fromhex(environment.get(SECRET_VARIABLE, ""))
        if len(given) == _SECRET_BYTES:
            return given
    return secrets.token_bytes(_SECRET_BYTES)


def share_secret(environment: MutableMapping[str, str]) -> None:
    """Puts a secret into this environment for all processes that inherit it."""
    environment[SECRET_VARIABLE] = drawn_secret(environment).hex()


def hash_ids(
    secret: bytes, prompt: Prompt, block_size: int, tenant: Tenant | None = None
) -> list[int]:
    """Returns a number for each block of a prompt; it stands for all tokens up to its end.

    tenant: whose salt does not count, so that a play can tell what tenants have in common.
    """
    salt = None if tenant is not None and prompt.salt == tenant.salt else prompt.salt
    state = blake2b(key=secret, digest_size=_NUMBER_BYTES)
    state.update(msgspec.msgpack.encode((prompt.model, prompt.lora, salt)))
    tokens = memoryview(prompt.tokens).cast("B")
    step = block_size * prompt.tokens.itemsize
    found = []
    for start in range(0, len(tokens), step):
        state.update(tokens[start : start + step])
        found.append(int.from_bytes(state.copy().digest()))
    return found


class _Passing(msgspec.Struct, eq=False):
    """A request in flight.

    decision: kept because its identity is the request's key. prompt: None once it is hashed, and
    for requests without known tokens, which have a session instead. session_header: the number of
    the session that a header names.
    """

    decision: Decision
    prompt: Prompt | None
    at: float
    numbers: "array[int] | None" = None
    session: str = ""
    session_header: str = ""


class _Sessions:
    """Numbers conversations whose tokens are not known, by the keys under which they are followed.

    The router remembers each request of a conversation under the key of its end, and finds the next
    one by it. Keys are mixed with a secret that is never written.
    """

    def __init__(self, secret: bytes, max_keys: int) -> None:
        self._secret = secret
        self._max_keys = max_keys
        self._by_key: dict[int, str] = {}

    def note(self, belonging: Belonging) -> str:
        """Returns the number of a request's conversation, "" if it cannot be followed."""
        turn = belonging.turn
        if not turn.keys:
            return ""
        known = (self._by_key.get(key) for key in (turn.follows, *turn.keys))
        session = next(filter(None, known), "") or self._drawn(turn.keys[0])
        for key in turn.keys:
            self._by_key.pop(key, None)  # so that it becomes the latest
            self._by_key[key] = session
        while len(self._by_key) > self._max_keys:
            del self._by_key[next(iter(self._by_key))]
        return session

    def _drawn(self, key: int) -> str:
        word = key.to_bytes(16, "little", signed=key < 0)
        return blake2b(word, key=self._secret, digest_size=_NUMBER_BYTES).hexdigest()


class _RecordFile:
    """The current file and the older ones. Only the thread uses it.

    clock: seconds since 1970. monotonic: seconds; files are started anew by this clock.
    """

    def __init__(
        self,
        settings: Settings,
        path: str,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._path = path
        self._most_bytes = settings.bytes // 2
        self._most_seconds = settings.hours * 3600 / 2
        self._clock = clock
        self._monotonic = monotonic
        self._began_at = -math.inf
        self._descriptor = -1
        self._size = 0
        self._fault = ""
        self.began = 0.0

    def ready(self, size: int = 0) -> bool:
        """Prepares a file for so many more bytes; starts a new one if it is time.

        Returns whether there is a file that they fit in.
        """
        if size > self._most_bytes:
            return False
        now = self._monotonic()
        is_old = now - self._began_at >= self._most_seconds
        is_full = self._size > 0 and self._size + size > self._most_bytes
        if self._descriptor >= 0 and not (is_old or is_full):
            return True
        try:
            self._begin(now, is_old=is_old)
        except OSError as error:
            self._tell(error)
            return False
        return True

    def write(self, text: bytes) -> bool:
        """Writes complete lines; returns whether that succeeded."""
        try:
            written = os.write(self._descriptor, text)
            if written < len(text):
                written += os.write(self._descriptor, text[written:])
            if written < len(text):
                raise OSError(None, "only a part could be written")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            self._tell(error)
            return False
        self._size += len(text)
        if self._fault:
            log.info("recorder.file: writing to %s works again", self._path)
            self._fault = ""
        return True

    def close(self) -> None:
        """Closes the file, and keeps it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self, now: float, *, is_old: bool) -> None:
        self.close()
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self._path)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(None, "is not a regular file")
            if found.st_size or self.began:
                # what is older than a file that is half of the hours old is older still
                self._keep_older(found.st_size, keeps_none=is_old and self.began > 0)
                Path(self._path).replace(self._path + OLDER)
                _make_private(self._path + OLDER)
            else:  # left by a router that ended before its first request
                Path(self._path).unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self._size = 0
        self.began, self._began_at = round(self._clock(), 3), now

    def _keep_older(self, size: int, *, keeps_none: bool) -> None:
        """Renames the older files, to make room for one more; deletes what is beyond the limits.

        size: of the one that becomes the latest of them.
        """
        names = [self._path + OLDER]
        names += [f"{self._path}{OLDER}.{number}" for number in range(2, MAX_OLDER + 1)]
        kept = 0
        for name in names:
            try:
                found = os.lstat(name)
            except FileNotFoundError:
                continue
            size += found.st_size
            # a file of an earlier run tells its age by the clock alone
            is_too_old = self._clock() - found.st_mtime > 2 * self._most_seconds
            if keeps_none or is_too_old or size > self._most_bytes or kept == MAX_OLDER - 1:
                Path(name).unlink()
                keeps_none = True  # the others are older
            else:
                Path(name).replace(f"{self._path}.shifted.{kept}")
                kept += 1
        for number in range(kept):
            Path(f"{self._path}.shifted.{number}").replace(names[number + 1])
            _make_private(names[number + 1])

    def _tell(self, error: OSError) -> None:
        fault = error.strerror or type(error).__name__
        if fault != self._fault:
            log.error("recorder.file: %s: %s; requests are not recorded", self._path, fault)
        self._fault = fault


def _make_private(path: str) -> None:
    """Lets nobody else read a file, whatever its mode was; links are left alone."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)


def _whose(decision: Decision) -> bytes | None:
    """Returns the tenant of a request, None if requests name none."""
    return None if decision.tenant is None else decision.tenant.name


class Recorder:
    """Records the requests of one router.

    path: the file. secret: the key of the blocks' numbers. clock: seconds since 1970. monotonic: a
    clock in seconds.
    recorded: lines written. not_recorded: requests that were not recorded, by reason.
    """

    def __init__(
        self,
        settings: Settings,
        path: str,
        secret: bytes,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        max_open: int = MAX_OPEN,
    ) -> None:
        self._places = Shares(max_open)  # of requests in flight
        self._block_size = settings.block_size
        self._secret = secret
        self._clock = clock
        self._monotonic = monotonic
        self._file = _RecordFile(settings, path, clock, monotonic)
        self._sessions = _Sessions(secret, max_open)
        self._open: dict[int, _Passing] = {}
        self._hashing: deque[_Passing] = deque()
        self._ended: deque[tuple[_Passing, Outcome | None]] = deque()
        self._tokens = Shares(MAX_QUEUED_TOKENS)  # of the event loop
        self._hashed: deque[tuple[bytes | None, int]] = deque()  # whose tokens, of the thread
        self.recorded = 0
        self.not_recorded: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._lost = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Writes the finished requests and ends the thread; requests in flight are not recorded."""
        self._stopping.set()
        self._thread.join(_CLOSE_SECONDS)

    def note_decision(
        self, decision: Decision, prompts: Sequence[Prompt], session: str = ""
    ) -> None:
        """Queues a request as soon as its worker is decided, or counts why it is not recorded.

        session: which a header names, "" without one.
        """
        if decision.is_steered and decision.verdict not in _SERVED:
            self.not_recorded["failed"] += 1
            return
        if len(prompts) > 1:
            self.not_recorded["several_prompts"] += 1
            return
        tokens = len(prompts[0].tokens) if prompts else 0
        while self._hashed:
            self._tokens.give_back(*self._hashed.popleft())
        whose = _whose(decision)
        is_full = len(self._hashing) + len(self._ended) >= MAX_QUEUED
        if is_full or not self._places.take(whose, 1):
            self.not_recorded["queue_full"] += 1
            return
        if not self._tokens.take(whose, tokens):
            self._places.give_back(whose, 1)
            self.not_recorded["queue_full"] += 1
            return
        passing = _Passing(decision, prompts[0] if prompts else None, self._monotonic())
        passing.session_header = self._number_of(b"session", session.encode(errors="surrogatepass"))
        self._open[id(decision)] = passing
        if not prompts:
            passing.session = self._sessions.note(decision.basis.belonging)
            return
        self._hashing.append(passing)

    def note_drop(self, decision: Decision) -> None:
        """Counts a decided request as failed that was not placed: the router refused it."""
        if self._left(decision) is not None:
            self.not_recorded["failed"] += 1

    def end(self, decision: Decision, outcome: Outcome | None) -> None:
        """Queues an ended request, or counts it as failed.

        outcome: None if the proxy did not send its response.
        """
        passing = self._left(decision)
        if passing is None:
            return
        if outcome is not None and (outcome.status or 0) >= FIRST_FAILURE:
            self.not_recorded["failed"] += 1
            return
        if not passing.decision.basis.prompt_tokens and not _counted_tokens(outcome):
            self.not_recorded["no_tokens"] += 1
            return
        self._ended.append((passing, outcome))

    def _left(self, decision: Decision) -> _Passing | None:
        """Forgets a request in flight; returns None if it is not recorded."""
        passing = self._open.pop(id(decision), None)
        if passing is not None:
            self._places.give_back(_whose(decision), 1)
        return passing

    def not_recorded_by_reason(self) -> dict[str, int]:
        """Returns how many requests were not recorded, for each reason."""
        return {**self.not_recorded, "disk": self._lost}

    def _run(self) -> None:
        while not self._stopping.wait(FLUSH_SECONDS):
            self._flush_safely()
        self._flush_safely()
        self._file.close()

    def _flush_safely(self) -> None:
        try:
            self._flush()
        except Exception:
            log.exception("recorder.file: requests are not recorded")

    def _flush(self) -> None:
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        # ended requests were queued for hashing before they ended, so all of them are hashed here
        while self._hashing:
            self._hash(self._hashing.popleft())
            time.sleep(0)  # let the event loop run
        self._file.ready()
        for passing, outcome in ended:
            self._write(passing, outcome)

    def _write(self, passing: _Passing, outcome: Outcome | None) -> None:
        size = _LINE_BYTES + _ID_BYTES * len(passing.numbers or ())
        if self._file.ready(size):
            line = msgspec.json.encode(self._line(passing, outcome)) + b"\n"
            if self._file.write(line):
                self.recorded += 1
                return
        self._lost += 1

    def _hash(self, passing: _Passing) -> None:
        prompt = passing.prompt
        if prompt is None:
            return
        self._hashed.append((_whose(passing.decision), len(prompt.tokens)))
        tenant = passing.decision.tenant
        numbers = hash_ids(self._secret, prompt, self._block_size, tenant)
        passing.numbers = array("Q", numbers)
        passing.prompt = (
            None  # the numbers replace it, so that a long answer keeps no prompt in memory
        )

    def _number_of(self, kind: bytes, name: bytes) -> str:
        """Returns what stands for a name of this kind, "" for an empty one."""
        if not name:
            return ""
        return blake2b(name, key=self._secret, digest_size=_NUMBER_BYTES, person=kind).hexdigest()

    def _line(self, passing: _Passing, outcome: Outcome | None) -> Line:
        at = self._clock() - (self._monotonic() - passing.at)
        line = Line(
            max(0, round((at - self._file.began) * 1000)),
            passing.decision.basis.prompt_tokens or _counted_tokens(outcome),
            0,
            self._block_size,
            self._file.began,
            passing.decision.model or "",
            None if passing.numbers is None else list(passing.numbers),
            passing.session,
            tenant=self._number_of(b"tenant", _whose(passing.decision) or b""),
            session_header=passing.session_header,
            placed_by=passing.decision.basis.policy if passing.decision.is_steered else PROXY,
        )
        if outcome is not None:
            line.output_length = outcome.reported.output_tokens or 0
            line.cached_length = outcome.reported.cached_tokens
            seconds = outcome.ttft_seconds if outcome.is_streamed else None
            line.ttft_ms = None if seconds is None else round(seconds * 1000)
        return line


def _counted_tokens(outcome: Outcome | None) -> int:
    """Returns the prompt tokens that an engine reported, 0 if it reported none."""
    return 0 if outcome is None else outcome.reported.prompt_tokens or 0


class RecorderCollector(Collector):
    """Shows how many requests were recorded, at every scrape."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """Yields the recorder's metric families."""
        recorded = CounterMetricFamily(
            "kvsteer_recorded", "Requests written to recorder.file", self._recorder.recorded
        )
        dropped = CounterMetricFamily(
            "kvsteer_not_recorded",
            "Requests that were not written to recorder.file, by reason",
            labels=["reason"],
        )
        for reason, count in self._recorder.not_recorded_by_reason().items():
            dropped.add_metric([reason], count)
        yield from (recorded, dropped)
