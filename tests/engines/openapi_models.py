"""Compares the request models of a running engine, by its GET /openapi.json, with those recorded.

    python -m tests.engines.openapi_models http://127.0.0.1:8000

Prints for each kind of object in a request the fields that went and came, and whether it keeps
others, against the newest release that `read_request_models.py` recorded. A schema tells neither
what templates get nor which fields a validator drops, so a difference is a reason to record the
release, and no difference proves nothing about these.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.extproc.requests.recorded_models import NEWEST_RECORD

MAX_BYTES = 16 * 1024 * 1024

# Where each kind of object is: the path of its API, and the fields that lead to it from the body.
PLACES: dict[str, tuple[str, ...]] = {
    "chat body": ("/v1/chat/completions",),
    "chat tool": ("/v1/chat/completions", "tools"),
    "chat function": ("/v1/chat/completions", "tools", "function"),
    "completion body": ("/v1/completions",),
    "messages body": ("/v1/messages",),
    "messages message": ("/v1/messages", "messages"),
    "messages block": ("/v1/messages", "messages", "content"),
    "messages tool": ("/v1/messages", "tools"),
    "messages tool_choice": ("/v1/messages", "tool_choice"),
    "messages output_config": ("/v1/messages", "output_config"),
    "responses body": ("/v1/responses",),
}

EXTRA = {True: "kept", False: "forbidden", None: "dropped"}


def objects_in(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns fields and `extra` of each kind of object that a document of OpenAPI 3 describes."""
    schemas = document.get("components", {}).get("schemas", {})
    found = {}
    for kind, (path, *fields) in PLACES.items():
        content = document.get("paths", {}).get(path, {}).get("post", {}).get("requestBody", {})
        schema = content.get("content", {}).get("application/json", {}).get("schema")
        for field in [None, *fields]:
            if field is not None and schema is not None:
                schema = schema.get("properties", {}).get(field)
            schema = next(_objects(schema, schemas), None)
        if schema is not None:
            names = list(schema.get("properties", ()))
            found[kind] = {"extra": EXTRA[schema.get("additionalProperties")], "fields": names}
    return found


def _objects(schema: dict[str, Any] | None, schemas: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the objects that a schema may mean: itself, a reference, choices, a list's items."""
    if schema is None:
        return
    if "$ref" in schema:
        yield from _objects(schemas.get(schema["$ref"].rpartition("/")[2]), schemas)
    elif "properties" in schema:
        yield schema
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")):
        yield from _objects(one, schemas)


def differences(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns what a document says otherwise than the newest record, by kinds of objects."""
    told = objects_in(document)
    found: dict[str, dict[str, Any]] = {}
    for kind in PLACES:
        before, after = NEWEST_RECORD.objects[kind], told.get(kind)
        if after is None:
            found[kind] = {"missing": True}
            continue
        old, new = set(before["fields"]), set(after["fields"])
        changed = {"gone": sorted(old - new), "new": sorted(new - old)}
        if before["extra"] != after["extra"]:
            changed["extra"] = [before["extra"], after["extra"]]
        if any(changed.values()):
            found[kind] = changed
    return found


def main() -> int:
    """Prints the differences; returns 0 if there are none, else 1."""
    with urllib.request.urlopen(f"{sys.argv[1]}/openapi.json", timeout=30) as answer:
        document = json.loads(answer.read(MAX_BYTES))
    found = differences(document)
    print(json.dumps({"against": NEWEST_RECORD.release, "differences": found}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
