"""Writes what vLLM's own scheduler gets and ends, with priorities, in lines of JSON.

Python imports this module at its start if the directory is on PYTHONPATH. A thread waits for the
scheduler of vLLM 0.32 (v1/core/sched/scheduler.py) and wraps two of its methods.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FILE = os.environ.get("KVSTEER_SCHEDULER_TRACE")
_MODULE, _ENDS = "vllm.v1.core.sched.scheduler", "_free_request"


def _wrap(scheduler: Any, name: str, event: str, file: Any) -> None:
    wrapped = getattr(scheduler, name)

    def write(self: Any, request: Any, *others: Any, **named: Any) -> Any:
        line = {
            "event": event,
            "at": time.monotonic(),
            "request": request.request_id,
            "priority": request.priority,
            "answer_tokens": request.num_output_tokens,
        }
        file.write(json.dumps(line) + "\n")
        return wrapped(self, request, *others, **named)

    setattr(scheduler, name, write)


def _trace(path: str) -> None:
    while not hasattr(getattr(sys.modules.get(_MODULE), "Scheduler", None), _ENDS):
        time.sleep(0.01)
    scheduler = sys.modules[_MODULE].Scheduler
    file = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends
    _wrap(scheduler, "add_request", "begin", file)
    _wrap(scheduler, _ENDS, "end", file)


if FILE:
    threading.Thread(target=_trace, args=(FILE,), daemon=True).start()
