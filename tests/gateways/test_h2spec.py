"""h2spec, another project's tests of HTTP/2 servers, against both sessions of the lean server.

h2spec sends requests that are not of gRPC, so the server refuses them, at once and with a content.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.extproc.serving.running import Running
from tests.ports import free_port

TESTS = 146
WAIT_SECONDS = "5"  # of each test for what it expects; those that fail wait as long

# The tests that fail, each for a reason why it does not apply.
_NO_TABLE = "exceeds the table size of 0 that h2spec has acknowledged (RFC 7541, section 6.3)"
_NO_PRIORITIES = "tests a rule of RFC 7540 that RFC 9113 has no longer (section 5.3.2)"
INAPPLICABLE = {
    "generic/5: Sends a dynamic table size update": _NO_TABLE,
    "generic/5: Sends multiple dynamic table size update": _NO_TABLE,
    "http2/5.3.1: Sends HEADERS frame that depend on itself": _NO_PRIORITIES,
    "http2/5.3.1: Sends PRIORITY frame that depend on itself": _NO_PRIORITIES,
}

# How tests begin that fail if the refusal of their first frame is faster than their second frame. A
# stream that is over then has no such error (RFC 9113, section 5.1); tests/system/attacks/rules.py
# tests these rules on open streams.
OVERTAKEN = (
    "http2/5.1: closed: Sends a DATA frame after sending RST_STREAM frame",
    "http2/5.1: closed: Sends a HEADERS frame after sending RST_STREAM frame",
    "http2/6.9.1: Sends multiple WINDOW_UPDATE frames increasing the flow control window to above",
    "http2/8.1: Sends a second HEADERS frame without the END_STREAM flag",
    "http2/8.1.2.1: Sends a HEADERS frame that contains a pseudo-header field as trailers",
    'http2/8.1.2.6: Sends a HEADERS frame with the "content-length" header field which does not',
)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    number = free_port()
    running = Running(f"127.0.0.1:{number}")
    await running.server.start()
    yield number
    await running.stop()


@pytest.mark.gateway
async def test_h2spec_passes(
    port: int, tmp_path: Path, program: Callable[[str], Path], ran: Callable[[str], None]
) -> None:
    report = tmp_path / "report.xml"
    options = ("-h", "127.0.0.1", "-p", str(port), "-o", WAIT_SECONDS, "-S", "-j", str(report))
    h2spec = await asyncio.create_subprocess_exec(
        program("h2spec"), *options, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await h2spec.communicate()
    cases = ET.parse(report).findall(".//testcase")
    failed = {
        f"{case.get('package')}: {case.get('classname')}"
        for case in cases
        if {one.tag for one in case} & {"failure", "error", "skipped"}
    }
    ran(f"h2spec: {len(cases)} tests, {len(failed)} failed")
    assert len(cases) == TESTS
    applicable = {name for name in failed if not name.startswith(OVERTAKEN)}
    assert applicable == set(INAPPLICABLE), output.decode()
