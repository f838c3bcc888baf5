"""The fields that vLLM's request models know: those recorded, and those of an engine that is here.

A new release is recorded by

    PYTHON-WITH-VLLM tests/engines/read_request_models.py > tests/engines/request_models/NAME.json

with its name, such as vllm-0.33.0; the last test then names what it changed.
"""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.dialect import NEWEST
from extproc.requests.request import parse
from extproc.tokenizing.tokens import Tokenizer
from kvtools.simulator.settings import TINY_MODEL
from tests.clients.rendering import RefusedError, rendering
from tests.engines import vllm_engine
from tests.extproc.requests.planted_fields import planted
from tests.extproc.requests.recorded_models import NEWEST_RECORD, RECORDS, Record

MISSING = vllm_engine.missing()
READER = Path(__file__).with_name("read_request_models.py")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


def of_engine() -> Record:
    """Returns what the engine's own models say."""
    command = [vllm_engine.PYTHON, str(READER)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    return Record(**json.loads(printed.stdout))


def changes(before: Record, after: Record) -> dict[str, Any]:
    """Returns what differs, by kinds of objects: the fields that went and came, else all of it."""
    kinds = before.objects.keys() | after.objects.keys()
    found = {}
    for kind in sorted(kinds):
        old, new = before.objects.get(kind, {}), after.objects.get(kind, {})
        if old != new:
            gone = sorted(set(old.get("fields", ())) - set(new.get("fields", ())))
            came = sorted(set(new.get("fields", ())) - set(old.get("fields", ())))
            found[kind] = {"gone": gone, "new": came} if gone or came else {"was": old, "is": new}
    return found


def test_models_of_the_engine_are_those_recorded() -> None:
    found = of_engine()
    recorded = RECORDS.get(found.release, NEWEST_RECORD)
    assert changes(recorded, found) == {}, f"vLLM {found.release} against {recorded.release}"


async def test_planted_fields_are_read_as_the_engine_reads_them() -> None:
    tokenizer = Tokenizer.load(Model(name="m", tokenizer=str(TINY_MODEL)))
    assert tokenizer is not None
    differences, compared = [], 0
    async with rendering(vllm_engine.PYTHON, TINY_MODEL) as renderer:
        for path, body, place in planted():
            try:
                theirs = await asyncio.wait_for(renderer.ids_of(path, body), 120)
            except RefusedError:
                continue
            compared += 1
            try:
                (prompt,) = parse(path, json.dumps(body).encode(), lambda _: NEWEST).prompts
                ours: object = tokenizer.encode(prompt).tolist()
            except RequestError as error:
                ours = error.reason
            if ours != theirs:
                differences.append((place, ours if isinstance(ours, str) else "other ids"))
    assert differences == []
    assert compared > 500
