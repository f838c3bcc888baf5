"""Terminal output of commands: text without control codes, tables, and an explained request."""

from collections.abc import Mapping, Sequence
from typing import Any

from extproc.commands.layout import PLAIN, Layout, Tone, width

Row = Sequence[str]


def plain(text: object) -> str:
    """Returns the text without a terminal's control characters."""
    return "".join(one if one.isprintable() else "?" for one in str(text))


def table(heads: Row, rows: Sequence[Row], sides: str) -> list[str]:
    """Returns the lines of a table with columns as wide as their contents; the last is not padded.

    sides: < (left) or > (right) for each column.
    """
    widths = [max(width(row[at]) for row in [heads, *rows]) for at in range(len(heads))]
    return ["  ".join(map(_padded, row, sides, widths)).rstrip() for row in [heads, *rows]]


def _padded(text: str, side: str, columns: int) -> str:
    blank = " " * (columns - width(text))
    return f"{blank}{text}" if side == ">" else f"{text}{blank}"


# More candidates than these are only counted.
MAX_CANDIDATES = 20

_HEADS = ("WORKER", "FEED", "HOLDS", "COMPUTE", "QUEUED", "RUNNING", "COST", "NOTES")


def explained(explanation: Mapping[str, Any], layout: Layout = PLAIN) -> list[str]:
    """Returns the answer of POST /explain as a sentence and a table of the candidates."""
    pick = list(explanation["pick"])
    order = {endpoint: place for place, endpoint in enumerate(pick)}
    ranked = sorted(
        explanation["candidates"],
        key=lambda one: (
            bool(one["excluded"]),
            order.get(one["endpoint"], len(order)),
            one["cost"] is None,
            one["cost"] or 0.0,
        ),
    )
    rows = [_candidate(one, order.get(one["endpoint"]), layout) for one in ranked[:MAX_CANDIDATES]]
    lines = [_sentence(explanation, ranked)]
    ids = {"request": explanation.get("request_id"), "trace": explanation.get("trace_id")}
    if any(ids.values()):
        lines.append(", ".join(f"{name} {plain(one)}" for name, one in ids.items() if one))
    treatment = explanation.get("treatment")  # only of a request that was asked about
    if treatment and treatment["why"]:
        lines.append(f"Before: {plain(treatment['why'])}.")
    token_ids = explanation.get("token_ids")  # only where they may go along
    if token_ids:
        lines.append(f"Token ids: {plain(token_ids['why'])}.")
    if rows:
        lines += ["", *table(_HEADS, rows, "<<>>>>><")]
    if len(ranked) > MAX_CANDIDATES:
        lines.append(f"... and {len(ranked) - MAX_CANDIDATES} more; --json has all of them")
    if rows:
        unit = "HOLDS counts tokens; COST is COMPUTE + QUEUED + RUNNING, in tokens of work"
        lines += ["", f"{unit} (tokens, slowness and weight multiplied); the lowest wins."]
        if explanation["policy"] != "cost":
            lines[-1] += f" This was decided by the policy {plain(explanation['policy'])}."
    return lines


def _sentence(explanation: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]) -> str:
    goes = "went" if "id" in explanation else "would go"  # a decision that was made has a number
    if not explanation["pick"]:
        return f"It {goes} to no worker: {plain(explanation['why'])}."
    first, able = ranked[0], [one for one in ranked if not one["excluded"]]
    where = f"It {goes} to {_named(first)}"
    if not explanation["steered"]:
        where = f"It is not steered, so Envoy chooses; steered, it would go to {_named(first)}"
    said = f"{where}: {_reason_sentence(explanation, first)}"
    if explanation["policy"] == "cost":
        said += f"; its cost is {first['cost']:.0f} tokens of work"
        said += (
            f", the next best is {_named(able[1])} with {able[1]['cost']:.0f}" if able[1:] else ""
        )
    return f"{said}.{_other_workers(explanation)}"


def _named(one: Mapping[str, Any]) -> str:
    name, endpoint = plain(one["name"]), plain(one["endpoint"])
    return name if name == endpoint else f"{name} ({endpoint})"


def _reason_sentence(explanation: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    whole, reason = (
        f"of the {explanation['prompt_tokens']} prompt tokens",
        plain(explanation["reason"]),
    )
    words = {
        "overlap": f"it holds {first['overlap_tokens']} {whole}",
        "uncertain_overlap": f"it probably holds {first['uncertain_tokens']} {whole}",
        "speculative_overlap": f"a request under way there will leave {first['speculative_tokens']}"
        f" {whole} in its cache",
        "approximate_overlap": f"it was sent {first['approximate_tokens']} {whole} before",
        "nothing_cached": f"no worker holds any {whole}, and it has the least load",
    }
    if explanation.get("loads") and reason == "nothing_cached":
        return f"it holds none {whole}, and can load from a store"
    if reason.startswith("policy_"):
        return f"the policy {reason.removeprefix('policy_')} chose it, and it ignores caches"
    return (
        words.get(reason) or f"{plain(explanation['decided'])}; the tokens are not known ({reason})"
    )


def _other_workers(explanation: Mapping[str, Any]) -> str:
    """Returns sentences on the other workers involved in the request, "" if there are none."""
    prefill, source, said = explanation["prefill"], explanation["source"], ""
    if prefill is not None:
        who = "The same worker" if prefill["pick"] is None else plain(prefill["pick"])
        said += f" {who} computes the prompt: {plain(prefill['why'])}."
    if source is not None:
        said += f" It pulls {source['tokens']} tokens from {plain(source['endpoint'])}."
    loads = plain(explanation.get("loads") or "")  # routers of earlier releases do not say it
    return f"{said} {loads[:1].upper()}{loads[1:]}." if loads else said


def _candidate(one: Mapping[str, Any], place: int | None, layout: Layout) -> Row:
    terms, notes = one["cost_terms"], []
    if place is not None:
        notes.append("picked" if place == 0 else f"number {place + 1} if that fails")
    if one["excluded"]:
        notes.append(f"not possible: {one['excluded']}")
    elif not one["sampled"]:
        notes.append("not compared: not in the random sample")
    notes += [] if terms is None else _factors(terms)
    room = 0.0 if terms is None else terms["conversations"]
    patience = 0.0 if terms is None else terms["patience"]
    notes += [f"{room:.0f} more for the conversations there"] if room else []
    notes += [f"{patience:.0f} more queued, which it does not mind"] if patience else []
    siblings = 0.0 if terms is None else terms.get("siblings", 0.0)
    notes += [f"{siblings:.0f} less for siblings just sent there"] if siblings else []
    fetched = 0.0 if terms is None else terms.get("fetched", 0.0)
    notes += [f"computes {fetched:.0f} less, as it would fetch blocks"] if fetched else []
    kinds = {kind: one[f"{kind}_tokens"] for kind in ("uncertain", "speculative", "approximate")}
    notes += [f"{tokens} {kind}" for kind, tokens in kinds.items() if tokens]
    numbers = ["-"] * 4
    if terms is not None and not one["excluded"]:
        queued = terms["queued"] - patience
        costs = (terms["uncached"] - terms["session"] - fetched, queued, terms["running"])
        numbers = [f"{number:.0f}" for number in (*costs, one["cost"])]
    held = str(one["overlap_tokens"])
    row = [_named(one), plain(one["state"]), held, *numbers, plain("; ".join(notes))]
    tone = Tone.GOOD if place == 0 else Tone.FAINT if one["excluded"] else None
    return row if tone is None else [layout.tone(text, tone) for text in row]


# Factors that round to 1.00 are not shown.
_LEAST_FACTOR = 0.005


def _factors(terms: Mapping[str, float]) -> list[str]:
    """Returns how the cost of computing comes about, where it is not the number of tokens."""
    tokens, slowness = terms["uncached_tokens"], terms["slowness"]
    if tokens <= 0 or slowness <= 0:
        return []
    factors = {"slowness": slowness, "weight": terms["uncached"] / (tokens * slowness)}
    shown = [f"{one:.2f} {name}" for name, one in factors.items() if abs(one - 1) >= _LEAST_FACTOR]
    return [" x ".join((f"computes {tokens:.0f} tokens", *shown))] if shown else []
