"""`kvsteer why`: why prompts were computed again, and who breaks the cache."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from shutil import get_terminal_size
from urllib.parse import urlencode

from extproc.base.errors import StartError
from extproc.commands.admin_client import ask_for
from extproc.commands.admin_json import Misses, Sender, Turn
from extproc.commands.layout import Layout, Tone, cut, layout_of
from extproc.commands.router_url import add_admin
from extproc.commands.terminal import plain, table

# What each cause says; docs/why-computed-again.md says more.
_GLOSSES = {
    "reused": "in the worker's cache",
    "new": "added since the conversation's last prompt",
    "first": "of conversations that begin",
    "block": "behind the last whole block, which is all that engines reuse",
    "changed": "again: the client changed its prompt before them",
    "evicted": "again: the worker had evicted them",
    "elsewhere": "again: another worker holds them",
    "restarted": "again: the worker's engine had started anew",
    "cleared": "again: the worker's cache had been cleared",
    "gone": "again: the worker that held them is gone",
    "not_stored": "again: the request before had failed",
    "unknown": "again, or for the first time: it is not known why",
}

_BAR_CELLS = 24
MOST_BREAKS = 5
MOST_CLIENTS = 12
MOST_TURNS = 10

# Where no terminal cuts lines.
_WIDE = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=run)
    parser.description = (
        "Shows what became of the prompts of a running router: how many tokens were reused, why the"
        " others were computed, and which clients change their prompts where. It needs `misses:"
        " {enabled: true}`."
    )
    parser.add_argument(
        "of",
        nargs="?",
        default="",
        metavar="REQUEST|CONVERSATION",
        help="an x-request-id, or the number of a conversation: only its turns",
    )
    add_admin(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the answer; returns the exit status.

    Raises:
        StartError: the router cannot be asked, or does not keep what was asked for.
    """
    of = arguments.of
    named = {"conversation" if of.isdecimal() else "request_id": of} if of else {}
    path = f"/misses?{urlencode(named)}" if named else "/misses"
    found = ask_for(Misses, "why", arguments.admin, path)
    if not found.enabled:
        raise StartError("why: the router does not look for it; set `misses: {enabled: true}`")
    if of and not found.turns:
        raise StartError(plain(f"why: no verdict of {of!r} is kept"))
    columns = get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    layout = layout_of(sys.stdout, os.environ)
    lines = turn_lines(found.turns) if of else picture(found, layout)
    print("\n".join(cut(line, columns) for line in lines))
    return 0


def picture(found: Misses, layout: Layout) -> list[str]:
    """Returns the lines that show who breaks the cache, the causes, the clients and the turns."""
    total = sum(found.tokens.values())
    if not total:
        return ["No request with known tokens has ended yet."]
    lines = [plain(one.says) for one in found.breaks[:MOST_BREAKS] if one.says]
    lines = lines or ["No client changed what it had sent before."]
    since = f"in {_hours(found.seconds)}, since the router started"
    lines += ["", f"{total:,} prompt tokens {since}, by what became of them:"]
    lines += _causes(found.tokens, total, layout)
    lines += ["", *_clients(found.clients)]
    lines += ["", "Last turns:", *turn_lines(found.turns[: -MOST_TURNS - 1 : -1])]
    return lines


def turn_lines(turns: Sequence[Turn]) -> list[str]:
    """Returns a line for each turn."""
    return [plain(_turn(one)) for one in turns]


def _turn(one: Turn) -> str:
    at = datetime.fromtimestamp(one.at, UTC).strftime("%H:%M:%S")
    who = f"{one.client}, conversation {one.conversation}, turn {one.turn}, {one.worker}"
    return f"{at} {who}: {one.says}"


def _causes(tokens: Mapping[str, int], total: int, layout: Layout) -> Iterator[str]:
    for cause, count in sorted(tokens.items(), key=lambda one: -one[1]):
        share = count / total
        gloss = _GLOSSES.get(cause, "")
        is_again = gloss.startswith("again")
        tone = Tone.GOOD if cause == "reused" else Tone.BAD if is_again else Tone.FAINT
        bar = layout.bar(share, _BAR_CELLS)
        name = layout.tone(f"{plain(cause):<11}", tone)
        yield f"  {name} {count:>13,} {share:>6.1%} {bar} {gloss}".rstrip()


def _clients(clients: Sequence[Sender]) -> list[str]:
    has_price = any(one.again_price is not None for one in clients)
    heads = ["CLIENT", "MODEL", "REQUESTS", "TOKENS", "REUSED", "AGAIN", "PREFILL AGAIN", "MOSTLY"]
    heads[7:7] = ["PRICE"] if has_price else []
    rows = [_client(one, has_price=has_price) for one in clients[:MOST_CLIENTS]]
    return table(heads, rows, "<<" + ">" * (len(heads) - 3) + "<")


def _client(one: Sender, *, has_price: bool) -> list[str]:
    total = max(1, one.prompt_tokens)
    name = one.client + (f" ({one.tenant})" if one.tenant else "")
    row = [
        plain(name),
        plain(one.model),
        f"{one.turns:,}",
        f"{one.prompt_tokens:,}",
        f"{one.tokens.get('reused', 0) / total:.1%}",
        f"{one.again_tokens / total:.1%}",
        f"{one.again_seconds:,.1f} s",
        plain(one.cause) or "-",
    ]
    row[7:7] = [f"{one.again_price or 0.0:.3g}"] if has_price else []
    return row


def _hours(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3_600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
