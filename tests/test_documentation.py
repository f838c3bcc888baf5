"""The documentation says what the code does."""

import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from extproc.__main__ import make_parser
from extproc.config.feed_kinds import KINDS
from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.disaggregation.legs import WORDS
from extproc.features.classes.class_figures import ClassFigures
from extproc.features.fetching.store_figures import StoreCollector
from extproc.features.handing.handing_figures import HandingFigures
from extproc.features.holding.hold_figures import HoldFigures
from extproc.features.misses.last_prompts import LastPrompts
from extproc.features.misses.miss_figures import MissFigures
from extproc.features.misses.totals import Totals
from extproc.features.recording.recorder import Recorder, RecorderCollector
from extproc.fleet.discovery.discovery import DiscoveryCollector
from extproc.fleet.proof.verifying import VerifiedCollector
from extproc.observing import outcomes
from extproc.observing.deliveries import DeliveryCounts, SteeringCollector
from extproc.observing.faults import FaultCollector, Faults
from extproc.observing.fleet_families import ServerCollector, ServerFigures
from extproc.observing.metrics import Metrics
from extproc.observing.probe_figures import ProbeFigures
from extproc.observing.unrecognized import UnrecognizedCollector, UnrecognizedRequests
from extproc.routing.handing import OUTCOMES
from extproc.routing.steering import Steering
from extproc.running.feed_role import FeedRoleCollector
from extproc.running.state_file import StateCollector
from extproc.sharing.sharing import SharingCollector
from tests.documented import PAGES, options_by_command
from tests.extproc.nobody import Nobody

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

# Fewer characters explain no option.
MIN_HELP = 8


def rows_of(kind: type, path: str, shown: dict[type, str]) -> Iterator[str]:
    """A line for every key of a section and of those in it; a section's keys stand once."""
    hints = typing.get_type_hints(kind)
    for item in fields(kind):
        key = f"{path}{item.name}"
        inner = section_in(hints[item.name])
        if inner in shown:
            yield f"- `{key}`: as `{shown[inner]}`"
            continue
        if inner is None or has_scalar(hints[item.name]):
            doc, choices = item.metadata["doc"], item.metadata["choices"]
            if not all(re.search(rf"\b{choice}\b", doc) for choice in choices):
                doc += f" ({', '.join(choices)})"
            yield f"- `{key}`{default_of(item)}: {doc}"
        if inner is not None:
            is_list = typing.get_origin(hints[item.name]) is tuple
            shown[inner] = f"{key}[]" if is_list else key
            yield from rows_of(inner, f"{shown[inner]}.", shown)


def default_of(item: Field[typing.Any]) -> str:
    if item.default in (None, ()):
        return ""
    return " (required)" if item.default is MISSING else f" ({yaml_of(item.default)})"


def has_scalar(hint: object) -> bool:
    """Whether a string or a literal may stand in place of a section."""
    kinds = typing.get_args(hint)
    return str in kinds or any(typing.get_origin(kind) is typing.Literal for kind in kinds)


def section_in(hint: object) -> type | None:
    """The dataclass in a type hint: the hint itself, an item of a list, or one of a union."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) in (tuple, typing.Union):
        return next((one for one in map(section_in, typing.get_args(hint)) if one), None)
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def yaml_of(value: object) -> str:
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1_000).splitlines()[0]}`"


def test_configuration_keys_are_documented_as_in_the_code() -> None:
    documented = re.findall(r"^- `.*$", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert documented == list(rows_of(Config, "", {}))


def test_kinds_of_feeds_are_all_documented_with_the_extras_that_they_need() -> None:
    page = (DOCS / "engines.md").read_text().partition("## Events\n")[2]
    rows = re.findall(r"^\|.*`events: \{(\w+): .*$", page.partition("\n## ")[0], re.MULTILINE)
    assert set(rows) == {kind.key for kind in KINDS}
    for kind in KINDS:
        named = [row for row in page.splitlines() if f"`events: {{{kind.key}: " in row]
        extras = {one for row in named for one in re.findall(r"`pip install '\.\[(\w+)\]'`", row)}
        assert extras == ({kind.extra} if kind.extra else set()), kind.key
    together = (DOCS / "configuration.md").read_text().partition("two workers with the same")[2]
    assert names_said(together.partition(";")[0]) >= {kind.key for kind in KINDS}


def test_example_configuration_is_accepted() -> None:
    text = (DOCS / "configuration.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(parse(example, "docs/configuration.md").workers) == 5


def test_commands_are_all_documented_and_their_options_explained_by_help() -> None:
    commands = options_by_command(make_parser(None))
    rows = re.findall(r"^\| `kvsteer (\w+)` \|", (DOCS / "start.md").read_text(), re.MULTILINE)
    assert rows == list(commands)
    options = [one for several in commands.values() for one in several]
    assert len(options) > 50
    assert [one.option_strings for one in options if len(one.help or "") < MIN_HELP] == []


def test_metrics_are_all_documented_with_their_type() -> None:
    metrics = Metrics(Nobody())
    metrics.registry.register(DiscoveryCollector(list))
    metrics.registry.register(SharingCollector(None))
    metrics.registry.register(StateCollector(None))
    metrics.registry.register(FaultCollector(Faults()))
    metrics.registry.register(UnrecognizedCollector(UnrecognizedRequests(int, float)))
    metrics.registry.register(FeedRoleCollector(None))
    metrics.registry.register(VerifiedCollector(dict))
    metrics.registry.register(StoreCollector(list))
    metrics.registry.register(ClassFigures())
    metrics.registry.register(HoldFigures(dict))
    metrics.registry.register(HandingFigures(tuple))
    metrics.registry.register(MissFigures(Totals(), LastPrompts(1)))
    metrics.registry.register(ProbeFigures())
    recorder = Recorder(Config().recorder, "trace.jsonl", bytes(32))
    metrics.registry.register(RecorderCollector(recorder))
    metrics.registry.register(SteeringCollector(DeliveryCounts(), {}, {}, Steering()))
    metrics.registry.register(ServerCollector(lambda: ServerFigures(0, {}, 0)))
    text = generate_latest(metrics).decode()
    shown = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE))
    documented = dict(
        re.findall(
            r"^- `(kvsteer_\w+)` \((\w+)\): ", (DOCS / "metrics.md").read_text(), re.MULTILINE
        )
    )
    assert documented == {
        name: kind for name, kind in shown.items() if not name.endswith("_created")
    }


def test_sharing_message_outcomes_are_all_explained() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "extproc/sharing").glob("*.py"))
    rejected = re.findall(r'MessageError\("(\w+)"\)', sources)
    (row,) = [
        line
        for line in (DOCS / "metrics.md").read_text().splitlines()
        if line.startswith("- `kvsteer_sharing_messages_total`")
    ]
    explained = set(re.findall(r"`(\w+)`", row)) - {"kvsteer_sharing_messages_total", "outcome"}
    assert explained == {"sent", "not_sent", "accepted", *rejected}


def names_said(text: str) -> set[str]:
    """The names in backquotes; one that ends with ... stands for all that begin so."""
    return set(re.findall(r"`([a-z]\w*(?:\.\.\.)?)`", text))


def is_said(name: str, said: set[str]) -> bool:
    return name in said or any(one.endswith("...") and name.startswith(one[:-3]) for one in said)


def test_kinds_of_a_feed_are_all_explained() -> None:
    paths = (ROOT / "kvstate").rglob("*.py")
    sources = "".join(path.read_text() for path in paths if path.name != "mooncake_wire.py")
    skipped = re.findall(r'(?:Skipped|faults\.append)\("(\w+)"\)', sources)
    lost = re.findall(r'(?:lost = |return )"(\w+_batch)"', sources)
    page = (DOCS / "internals" / "reasons.md").read_text()
    said = names_said(page.partition("## Kinds counted on a feed")[2].partition("\n## ")[0])
    assert {name for name in (*skipped, *lost) if not is_said(name, said)} == set()
    assert {one for one in said if not re.search(rf"\b{one.rstrip('.')}", sources)} == set()


def test_reasons_of_requests_without_tokens_are_all_explained() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "extproc").rglob("*.py"))
    reasons = set(re.findall(r'RequestError\(\s*"(\w+)"\)', sources))
    assert len(reasons) > 40
    pages = [DOCS / f"{name}.md" for name in ("internals/reasons", "requests", "metrics")]
    assert reasons - names_said("".join(page.read_text() for page in pages)) == set()


def test_split_outcomes_are_all_explained() -> None:
    text = (
        (DOCS / "internals" / "reasons.md").read_text().partition("## Who computes a prompt\n")[2]
    )
    table = text.partition("\n## ")[0]
    assert {one for one in re.findall(r"`(\w+)`", table) if one in WORDS} == set(WORDS)


def test_alerts_and_causes_are_all_documented() -> None:
    text = (DOCS / "metrics.md").read_text()
    rules = (ROOT / "deploy" / "prometheus" / "kvsteer.rules.yml").read_text()
    alerts = re.findall(r"^ *- alert: (\w+)", rules, re.MULTILINE)
    assert alerts == re.findall(r"^### (Kvsteer\w+)$", text, re.MULTILINE)
    for alert in alerts:
        assert f"docs/metrics.md#{alert.lower()}" in rules
    explained = re.findall(r"^- `(\w+)`:", outcomes.__doc__ or "", re.MULTILINE)
    page = (DOCS / "internals" / "reasons.md").read_text()
    section = page.partition("## Why predictions drift")[2].partition("\n## ")[0]
    assert explained == re.findall(r"^\| `(\w+)`", section, re.MULTILINE)


def test_links_of_the_documentation_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in plain}


def test_pages_of_the_site_link_to_no_part_of_the_readme() -> None:
    """On the site docs/index.md stands in its place, which has no such parts."""
    for page in DOCS.rglob("*.md"):
        assert "README.md#" not in page.read_text(), page.name


def test_anchors_of_links_exist() -> None:
    missing = [
        f"{page.name}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text())
        if (target or page.name).endswith(".md")
        and anchor not in anchors_of(page.parent / target if target else page)
    ]
    assert not missing, "\n".join(missing)


def test_pages_name_no_private_directory() -> None:
    for page in PAGES:
        assert not re.search(r"/(home|root|work|Users)/", page.read_text()), page.name


def test_pages_begin_with_their_readers() -> None:
    for page in DOCS.rglob("*.md"):
        title, blank, first = page.read_text().split("\n")[:3]
        assert title.startswith("# "), page.name
        assert (blank, first[:4]) == ("", "For "), page.name


def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: `make docs` installs it")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    pages |= {"changelog", "contributing", "reporting", "internals/results"}
    assert all((tmp_path / page / "index.html").exists() for page in pages - {"index"})
    assert (tmp_path / "repository" / "envoy" / "add-to-your-envoy.yaml").exists()
    # a step's commands belong to the step: what is not indented far enough ends the list
    steps = (tmp_path / "gateways" / "index.html").read_text().partition("<ol>")[2]
    assert "kubectl apply -k" in steps.partition("</ol>")[0]


def test_outcomes_of_token_ids_are_all_documented() -> None:
    page = (DOCS / "metrics.md").read_text().partition("## Outcomes of token ids\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", page.partition("\n## ")[0], re.MULTILINE)
    assert names_said(" ".join(rows)) == set(OUTCOMES)
