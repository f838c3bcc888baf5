"""The life of a router's process: its start, reloads by SIGHUP, and its stop by a signal."""

import asyncio
import functools
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

from extproc.base import logs
from extproc.base.errors import ConfigError, ExtraError, StartError
from extproc.config.fleet_rules import missing_extras
from extproc.config.reader import changed_keys, load
from extproc.config.rules import doubts
from extproc.config.schema import Config
from extproc.running.app import RunningRouter, running
from extproc.running.event_loop import Sweeper
from extproc.running.handover import Predecessor, take_over
from extproc.running.hangup import Hangup
from extproc.running.processes import ProcessMember
from extproc.running.single_flight import SingleFlight
from extproc.serving.listening import raise_file_limit

log = logging.getLogger("kvsteer")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# The keys that SIGHUP reloads.
_RELOADED = frozenset(("events.enabled", "steering.percent"))

# A thread that parses or renders yields to the event loop after this time: Python's default of 5 ms
# is a large part of a decision's deadline.
SWITCH_SECONDS = 0.001

# With fewer open files, connections to a thousand workers may fail.
FEW_FILES = 4096

# Time to stop, besides `extproc.leave_ms` and `extproc.drain_ms`; then the process ends by force.
STOP_SECONDS = 10.0


async def serve(
    path: str, config: Config, member: ProcessMember | None = None, *, takes_over: bool = False
) -> None:
    """Runs a router until SIGTERM or SIGINT, or until another one has taken over from it.

    path: the file that `config` was read from. member: its place among several processes with this
    configuration; it then also stops when their parent ends. takes_over: whether it takes state and
    listening sockets from the router that runs with the same state file.

    To stop, it reports that it is not ready, accepts no new streams after `extproc.leave_ms`, gives
    open streams time to finish, and ends; a second signal ends it at once. SIGHUP reloads the kill
    switch, the percentage of steered requests and the TLS files, unless it says that the terminal
    was closed: that stops the router.

    Raises:
        StartError: it cannot start.
    """
    read_again = functools.partial(_read, path, config.extproc.processes, member)
    if member is not None:
        config = member.part_of(config)
    logs.configure(config.log.level, config.log.format, member and member.number)
    _require_extras(config)
    _raise_file_limit()
    for note in doubts(config, os.path.exists):
        log.warning("%s", note)
    stopped, leave_ms = asyncio.Event(), config.extproc.leave_ms
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        _end_by_force(loop, (leave_ms + config.extproc.drain_ms) / 1000 + STOP_SECONDS)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    is_orphan = asyncio.Event()
    if member is not None:
        _end_with_parent(loop, is_orphan, stop)
    # nothing to reload yet: the configuration was just read; unhandled, SIGHUP ends the process
    hangup = Hangup()
    loop.add_signal_handler(signal.SIGHUP, lambda: stop() if hangup.is_end else None)
    before = await _predecessor(config, member) if takes_over else None
    async with running(config, member, before) as router:
        # one after the other: of two that overlap, the older file could be applied last
        reload = SingleFlight(lambda: _reload(read_again, config, router), "not reloaded")
        loop.add_signal_handler(signal.SIGHUP, lambda: stop() if hangup.is_end else reload.want())
        sweeper = Sweeper()
        sweeper.start()
        sys.setswitchinterval(SWITCH_SECONDS)
        log.info(
            "serving ext_proc on %s, admin on http://%s, metrics on http://%s",
            config.extproc.listen,
            config.admin.listen,
            config.metrics.listen,
        )
        if config.probe is not None:
            log.info("serving probes on http://%s", config.probe.listen)
        log.info(
            "started with %.2f s of CPU time; %d MiB resident", time.process_time(), _resident_mib()
        )
        following = asyncio.create_task(_stop_when_replaced(router, stop))
        await stopped.wait()
        following.cancel()
        sweeper.close()
        router.readiness.is_stopping = True
        await _leave(router, leave_ms)
        log.info("stopping: open streams have %d ms to finish", config.extproc.drain_ms)
    if member is not None and is_orphan.is_set():
        member.leave()


async def _predecessor(config: Config, member: ProcessMember | None) -> Predecessor | None:
    """Returns the router that this one replaces, None if none runs.

    Raises:
        StartError: it cannot be replaced.
    """
    if config.state.file is None or member is not None:
        raise StartError("take-over: needs state.file, and one process")
    sections = {
        "extproc": config.extproc.listen,
        "admin": config.admin.listen,
        "metrics": config.metrics.listen,
    }
    if config.probe is not None:
        sections["probe"] = config.probe.listen
    return await asyncio.to_thread(take_over, config.state.file, sections)


async def _leave(router: RunningRouter, leave_ms: int) -> None:
    """Writes the state, and waits until proxies have noticed that the router stops."""
    if router.replaced.is_set():
        return
    if router.state is not None:
        # and again at the end, for which whoever stops a container may not wait
        router.state.hurry()
    if leave_ms:
        log.info("stopping: reporting not ready, accepting new streams for %d ms", leave_ms)
        await asyncio.sleep(leave_ms / 1000)


async def _stop_when_replaced(router: RunningRouter, stop: Callable[[], None]) -> None:
    await router.replaced.wait()
    log.info("another router has taken over")
    stop()


def _require_extras(config: Config) -> None:
    """Refuses to start without a required extra: without its feeds, a fleet would only seem slow.

    Raises:
        ExtraError: keys need extras that are not installed; the error names one key for each.
    """
    missing = {one.name: one.key for one in missing_extras(config, find_spec)}
    if missing:
        raise ExtraError(", ".join(missing.values()), *missing)


def _raise_file_limit() -> None:
    before, files = raise_file_limit()
    log.info("limit of open files: %d (was %d)", files, before)
    if files < FEW_FILES:
        log.warning(
            "only %d files and connections may be open: raise the limit (ulimit -Hn,"
            " LimitNOFILE) for fleets of hundreds of workers",
            files,
        )


def _resident_mib() -> int:
    """Returns this process's peak memory in MiB, which right after the start is the current one."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 2**20


def _end_by_force(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Lets the next signal, or a timer after so many seconds, end the process at once."""
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
    for number in (*STOP_SIGNALS, signal.SIGALRM):
        # the kernel drops signals for which the first process of a container has no handler
        signal.signal(number, _end_at_once if os.getpid() == 1 else signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _end_at_once(number: int, _: object) -> None:
    """Ends the process with the exit status that a shell uses for a process ended by a signal."""
    os._exit(128 + number)


def _end_with_parent(
    loop: asyncio.AbstractEventLoop, is_orphan: asyncio.Event, stop: Callable[[], None]
) -> None:
    """Stops when standard input is closed: the parent holds the other end, so it has ended.

    is_orphan: set in that case.
    """
    lifeline = sys.stdin.fileno()

    def ended() -> None:
        loop.remove_reader(lifeline)
        log.warning("the parent process is gone")
        is_orphan.set()
        stop()

    loop.add_reader(lifeline, ended)


def _read(path: str, processes: int, member: ProcessMember | None) -> Config:
    """Reads the configuration again, for the same process.

    Raises:
        ConfigError: it has faults.
    """
    config = load(path, processes)
    return config if member is None else member.part_of(config)


async def _reload(read_again: Callable[[], Config], before: Config, router: RunningRouter) -> None:
    if router.certificates is not None:
        await router.certificates.look(anyway=True)
    try:
        read = await asyncio.to_thread(read_again)  # with thousands of workers this takes a second
    except ConfigError as error:
        for fault in error.faults:
            log.error("not reloaded: %s", fault)
        return
    is_switched = read.events.enabled != router.workers.events_enabled
    await router.workers.enable_events(enabled=read.events.enabled)
    is_other = read.steering.percent != router.router.steering.percent
    if is_other:
        router.steer(read.steering.percent)
    changed = [key for key in changed_keys(before, read) if key not in _RELOADED]
    if changed:
        log.warning("configuration read again: these need a restart: %s", ", ".join(changed))
    elif not (is_switched or is_other):
        log.info("configuration read again: nothing changed")
