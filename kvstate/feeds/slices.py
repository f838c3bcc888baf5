"""Runs work in slices of time on the event loop, so that other tasks can run."""

import asyncio

from kvstate.steps import Result, StepByStep, Steps


async def sliced(steps: Steps[Result], slice_seconds: float) -> Result:
    """Runs steps in slices of time, so that other tasks can run, and returns the result."""
    loop = asyncio.get_running_loop()
    slice_ends = loop.time() + slice_seconds
    run = StepByStep(steps)
    for _ in run:
        if loop.time() >= slice_ends:
            await asyncio.sleep(0)
            slice_ends = loop.time() + slice_seconds
    return run.result
