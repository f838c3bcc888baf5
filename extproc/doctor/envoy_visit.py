"""Asks Envoy's admin server how Envoy is configured."""

from extproc.doctor.envoy_dump import judge_envoy
from extproc.doctor.findings import About, Finding
from extproc.doctor.means import Means

PATH = "/config_dump"


async def visit(means: Means) -> list[Finding]:
    """What is right and wrong with the Envoy whose admin address is configured."""
    at = means.config.envoy.admin
    about = About(f"envoy {at}")
    answer = await means.web.get(f"http://{at}{PATH}")
    if answer.status == 0:
        says = f"not checked: its admin server does not answer: {answer.reason}"
        return [about.note("envoy", says)]
    if not answer.is_ok:
        says = f"{PATH}: {answer.reason or f'status {answer.status}'}"
        return [about.wrong("envoy-unreadable", says)]
    return list(judge_envoy(about, means.config, answer.body))
