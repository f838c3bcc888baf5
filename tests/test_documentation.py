"""The documentation says what the code does."""

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import yaml
from prometheus_client import generate_latest

from extproc.config import Config
from extproc.config.reader import parse
from extproc.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def rows_of(kind: type, path: str) -> Iterator[str]:
    """A table row for every key of a section and of those in it."""
    hints = typing.get_type_hints(kind)
    for item in fields(kind):
        key = f"{path}{item.name}"
        inner = section_in(hints[item.name])
        if inner is None or has_scalar(hints[item.name]):
            default = "required" if item.default is MISSING else yaml_of(item.default)
            choices = " \\| ".join(item.metadata["choices"])
            doc = item.metadata["doc"] + (f" ({choices})" if choices else "")
            yield f"| `{key}` | {default} | {doc} |"
        if inner is not None:
            is_list = typing.get_origin(hints[item.name]) is tuple
            yield from rows_of(inner, f"{key}[]." if is_list else f"{key}.")


def has_scalar(hint: object) -> bool:
    """Whether a text or a word may stand in the place of a section."""
    kinds = typing.get_args(hint)
    return str in kinds or any(typing.get_origin(kind) is typing.Literal for kind in kinds)


def section_in(hint: object) -> type | None:
    """The dataclass that a hint holds, itself, in a list or optionally."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) in (tuple, typing.Union):
        return next((one for one in map(section_in, typing.get_args(hint)) if one), None)
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def yaml_of(value: object) -> str:
    if value in (None, ()):
        return "none"
    return f"`{yaml.safe_dump(value).splitlines()[0]}`"


def test_every_configuration_key_is_documented_as_the_code_has_it() -> None:
    documented = re.findall(r"^\| `.*\|$", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert documented == list(rows_of(Config, ""))


def test_the_example_configuration_is_accepted() -> None:
    text = (DOCS / "configuration.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(parse(example, "docs/configuration.md").workers) == 5


def test_every_metric_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text()
    metrics = Metrics()
    feed = {"rank": 0, "state": "live", "lag_seconds": 0, "orphans": 0, "gaps": 0}
    feed |= {"replays": 0, "restarts": 0, "counts": {"batches": 1}}
    tokens = {"matched": 0, "mismatched": 0, "without_evidence": 0, "differs": False}
    worker = {"name": "w", "in_flight": 0, "blocks_by_tier": {"device": 1}, "feeds": [feed]}
    worker["tokens"] = tokens
    metrics.add_workers(lambda: [worker], lambda: 0)
    shown = set(
        re.findall(r"^# TYPE (\S+)", generate_latest(metrics.registry).decode(), re.MULTILINE)
    )
    created = {name for name in shown if name.endswith("_created")}
    assert {f"`{name}`" for name in shown - created} == set(
        re.findall(r"^\| (`kvsteer_\w+`)", text, re.MULTILINE)
    )


def test_every_link_in_the_documentation_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_pages_name_the_environment_of_nobody() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]:
        assert not re.search(r"/(home|root|work|Users)/", page.read_text()), page.name
