"""The walk through the demo of docs/operations.md: `python -m tests.page.walk`.

On the same simulated workers none of the requests is steered, then half of them, then all. It takes
nine minutes, and prints each report.
"""

import asyncio
import sys
from typing import Any

from tests.page.steps import report_of, steer
from tests.system.system import running

# For each step, the percentage of steered requests, and how many seconds it lasts.
STEPS = ((0, 60), (50, 360), (100, 60))
CHANGES = {"accounting": {"responses": "usage"}, "steering": {"percent": 0}}
SPEEDS: dict[str, Any] = {"prefill_tokens_per_second": 8_000.0, "decode_tokens_per_second": 200.0}


async def _traffic(url: str, seconds: int) -> None:
    """Runs `kvsteer traffic` as docs/operations.md does."""
    options = ("traffic", "--url", url, "--seconds", str(seconds))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "extproc", *options)
    assert await process.wait() == 0


async def main() -> None:
    """Sends the traffic of all steps."""
    async with running(workers=3, changes=CHANGES, **SPEEDS) as system:
        for percent, seconds in STEPS:
            await steer(system, percent)
            await _traffic(system.envoy, seconds)
            print(f"{percent} % steered:", await report_of(system), sep="\n", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
