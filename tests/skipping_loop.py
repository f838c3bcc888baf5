"""An event loop in which hours pass at once."""

import asyncio
from collections.abc import Callable, Coroutine


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock is the real one plus what the test skips."""

    skipped_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_seconds


def run_skipping(scenario: Callable[[SkippingLoop], Coroutine[None, None, None]]) -> None:
    """Runs a test's scenario in such a loop."""
    loop = SkippingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario(loop))
