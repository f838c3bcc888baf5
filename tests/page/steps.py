"""What an operator does to prove the gain: steers a share of the requests, and reads the report."""

from tests.system.system import System


async def steer(system: System, percent: int) -> None:
    """Steers this percentage of the requests from now on."""
    async with system.session.post(f"{system.admin}/steering", json={"percent": percent}) as answer:
        answer.raise_for_status()


async def report_of(system: System) -> str:
    """Returns the report as text."""
    async with system.session.get(f"{system.admin}/report?format=text") as answer:
        answer.raise_for_status()
        return await answer.text()
