"""The router as a process: from its start to the signal that ends it."""

import asyncio
import gc
import logging
import os
import signal
import sys

from extproc import logs
from extproc.app import Parts, running
from extproc.changed_keys import changed_keys
from extproc.config import Config
from extproc.config.doubts import doubts
from extproc.config.reader import load
from extproc.errors import ConfigError
from extproc.serving.listening import raise_file_limit
from kvstate.core_choice import default_core_name, plain_core_warning

log = logging.getLogger("kvsteer")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# What SIGHUP changes.
_RELOADED = "events.enabled"

# A thread that parses or renders gives the event loop its turn after so long: Python's own 5 ms are
# a good part of what a decision may take.
SWITCH_SECONDS = 0.001

# Below this a fleet of a thousand workers may find no room.
FEW_FILES = 4096

# Besides `extproc.drain_ms`: what hangs after that is not waited for.
STOP_SECONDS = 10.0


async def serve(path: str) -> None:
    """Runs a router until SIGTERM or SIGINT.

    It then says that it is not ready, takes no new streams, gives those under way their time, and
    ends; a second signal ends it at once. SIGHUP reads the kill switch and the TLS files anew.

    Raises:
        ConfigError, StartError: it cannot start.
    """
    config = load(path)
    logs.configure(config.log.level, config.log.format)
    before, files = raise_file_limit()
    log.info("open files: %d at most (raised from %d)", files, before)
    if files < FEW_FILES:
        log.warning(
            "only %d files may be open, connections among them: raise the limit (ulimit -Hn,"
            " LimitNOFILE) for fleets of hundreds of workers",
            files,
        )
    for doubt in doubts(config, os.path.exists):
        log.warning("%s", doubt)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        _end_by_force(loop, config.extproc.drain_ms / 1000 + STOP_SECONDS)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    # what it would reload has just been read; unhandled, it would end the process
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    async with running(config) as parts:
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = loop.create_task(_reload(path, config, parts))
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        if warning := plain_core_warning():
            log.warning("%s", warning)
        log.info("index core: %s", default_core_name())
        log.info(
            "serving ext_proc on %s, admin on http://%s, metrics on http://%s",
            config.extproc.listen,
            config.admin.listen,
            config.metrics.listen,
        )
        await stopped.wait()
        log.info("stopping: streams under way have %d ms", config.extproc.drain_ms)
        parts.readiness.is_stopping = True


def _end_by_force(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Has the next signal end the process, and the clock, if nothing else has by then."""
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


async def _reload(path: str, before: Config, parts: Parts) -> None:
    if parts.certificates is not None:
        await parts.certificates.look(anyway=True)
    try:
        read = await asyncio.to_thread(load, path)  # thousands of workers take a second
    except ConfigError as error:
        for fault in error.faults:
            log.error("not reloaded: %s", fault)
        return
    is_switched = read.events.enabled != parts.workers.events_enabled
    await parts.workers.enable_events(enabled=read.events.enabled)
    changed = [key for key in changed_keys(before, read) if key != _RELOADED]
    if changed:
        log.warning("read again: these changed, and take a restart: %s", ", ".join(changed))
    elif not is_switched:
        log.info("read again: nothing changed")
