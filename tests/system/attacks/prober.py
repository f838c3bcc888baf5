"""Asks a router for decisions, a few times a second, from its own process.

`python -m tests.system.attacks.prober PORT PID SECONDS` prints for each request how long its answer
took, how much of that time the router worked, and how much memory its process then has, in seconds,
CPU seconds and bytes; it ends when its input does.
"""

import re
import select
import sys
import time
from pathlib import Path

import grpc

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from tests.extproc.messages import body, head
from tests.system.attacks.peer import PROCESS

PROMPT = b'{"model": "m", "prompt": [1, 2, 3]}'
WAIT_SECONDS = 60.0

# The clock of another process's CPU time: clock_getcpuclockid(3), which Python does not have.
_SCHEDULED = 2


def ask(channel: grpc.Channel) -> None:
    """Requests one decision, as Envoy does."""
    call = channel.stream_stream(
        PROCESS,
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
    answers = list(call(iter([head("/v1/completions"), body(PROMPT)]), timeout=WAIT_SECONDS))
    mutation = answers[-1].request_body.response.header_mutation
    assert mutation.set_headers[0].header.key == "x-gateway-destination-endpoint"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, "it has ended"
    return int(found[1]) * 1024


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used, all its threads together."""
    return time.clock_gettime(~pid << 3 | _SCHEDULED)


def main(port: int, pid: int, interval_seconds: float) -> None:
    """Asks until the input ends."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        while True:
            began, worked = time.monotonic(), cpu_seconds(pid)
            ask(channel)
            took, worked = time.monotonic() - began, cpu_seconds(pid) - worked
            print(took, min(took, worked), resident_bytes(pid), flush=True)
            rest = max(0.0, interval_seconds - took)
            if select.select([sys.stdin], [], [], rest)[0]:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
