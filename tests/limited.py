"""Calls of functions in processes of their own, which may take only so much memory and CPU.

They are forked from a process that has imported what most of them need: a call takes milliseconds,
where a new interpreter with these modules takes half a second.
"""

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_IMPORTED = ["pytest", "extproc.templates.chat_template", "extproc.tokenizing.tokens"]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(_IMPORTED)


def limited(
    function: Callable[..., Any],
    *arguments: Any,
    gibibytes: int,
    cpu_seconds: int,
    wait_seconds: float,
) -> Any:
    """Returns the answer of a function of some module, called in a process of its own.

    gibibytes: address space that it may have. wait_seconds: when it is given up; many times the CPU
    seconds, for a busy machine.

    Raises:
        AssertionError: it ended otherwise, or had not ended in time.
    """
    reader, writer = _SERVER.Pipe(duplex=False)
    limits = (gibibytes << 30, cpu_seconds)
    child = _SERVER.Process(target=_call, args=(writer, limits, function, arguments))
    child.start()
    writer.close()
    with contextlib.closing(reader):
        try:
            assert reader.poll(wait_seconds), f"not within {wait_seconds} s"
            answer = reader.recv()
        except EOFError:
            child.join()
            raise AssertionError(f"it ended with {child.exitcode}") from None
        finally:
            child.kill()
            child.join()
            child.close()
    return answer


def _call(
    writer: Connection,
    limits: tuple[int, int],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    memory, cpu_seconds = limits
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    writer.send(function(*arguments))
    os._exit(0)  # a thread that was given up may still work
