"""What vLLM's request models say of fields, by release, as recorded by tests/engines."""

import json
from pathlib import Path
from typing import Any, NamedTuple

DIRECTORY = Path(__file__).parents[2] / "engines" / "request_models"


class Record(NamedTuple):
    """The models of a release. objects: by kinds, as tests/engines/read_request_models.py says."""

    release: str
    objects: dict[str, dict[str, Any]]


RECORDS = {
    one.release: one
    for one in (Record(**json.loads(file.read_text())) for file in sorted(DIRECTORY.glob("*.json")))
}
NEWEST_RECORD = RECORDS[max(RECORDS)]
