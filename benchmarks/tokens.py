"""Benchmark of tokens: text to ids and body to pick, compared with tokenizer libraries.

python benchmarks/tokens.py [--quick | --smoke] [--json FILE]
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from agents_side import AGENT_GOAL, keyed_agents
from code_side import in_code
from measure import Goal, Row, or_reason
from peer_tokenizers import version
from rows import arguments, run
from tekken import single_bytes, tekken, write_model
from tokens_side import FIRST_SIGHT_GOAL, NEXT_TURN_GOAL, agents, first_sight, known, texts

SECTIONS: Mapping[str, Callable[[Path, int], list[Row]]] = {
    "texts": texts,
    "first_sight": first_sight,
    "known": known,
    "in_code": in_code,
    "agents": agents,
    "keyed_agents": keyed_agents,
}

# Those that tokenize nothing.
WITHOUT_VOCABULARY = ("agents",)

# The rows with a goal, by section, for when nothing can run.
GOALS: Mapping[str, tuple[str, Goal]] = {
    "first_sight": ("first sight, body to pick", FIRST_SIGHT_GOAL),
    "known": ("next turn, body to pick", NEXT_TURN_GOAL),
    "in_code": ("next turn rendered in code, body to ids", NEXT_TURN_GOAL),
    "keyed_agents": ("first sight of an agent, body to pick", AGENT_GOAL),
}

METHOD = """\
How: medians (least-most) of rounds, contestants in turn within a round, after one that does not
count; garbage collector off. A cost is the CPU time of all threads, or elapsed time where that is
less. The ratio is ours / reference, round by round. One vocabulary of 130k tokens; all contestants
gave the same ids for 20 texts before. Texts and first sights are new in every round, made of
the same words; a contestant takes one more before the clock starts, as a router at work does.
Body to pick: JSON, chat template, ids, overlap with 8 workers, decision. The reference gets the
prompt text. A next turn adds an answer of 2,400 characters and a question of 400.
"ours" uses fastokens, "ours on tokenizers" does not.
Conversations that engines render in code go from body to ids; the reference is oss-harmony on the
whole conversation for gpt-oss, and `tokenizers` on the whole text for DeepSeek V4.
The JSON of an agent's request that cannot be keyed becomes an outline of what it says, with the
marks by which a later turn is found. The reference decodes the same JSON.
One that can be keyed goes from body to pick by each API that agents use: a system of 12 KB, 20
tools, and turns that think, call a tool and get its result. The reference is the same conversation
as a chat completion, which takes the same path.
"""

FULL_ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS = 25, 7, 1


def main() -> None:
    """Runs all sections, or one of them."""
    parser = arguments("Benchmark of tokens.", "fewer rounds, within two minutes")
    parser.add_argument("--only", choices=SECTIONS, help="one section only")
    with run(parser, METHOD) as one, tempfile.TemporaryDirectory() as directory:
        rounds = one.amount(SMOKE_ROUNDS, QUICK_ROUNDS, FULL_ROUNDS)
        missing = _missing(Path(directory), is_smoke=one.options.smoke)
        for name, section in SECTIONS.items():
            if one.options.only in (None, name):
                print(f"measuring: {name}", flush=True)
                cannot = missing and name not in WITHOUT_VOCABULARY
                one.add(_cannot(name, missing) if cannot else section(Path(directory), rounds))
        packages = ("tokenizers", "tiktoken", "fastokens", "msgspec", "jinja2", "xxhash")
        print(f"\nRounds: {rounds}. {', '.join(map(version, packages))}")


def _missing(directory: Path, *, is_smoke: bool) -> str:
    """Writes the model to measure with; returns why that is not possible, "" if it is."""
    vocabulary = or_reason(tekken)
    if isinstance(vocabulary, str):
        if not is_smoke:
            return vocabulary
        vocabulary = single_bytes()
    write_model(directory, vocabulary)
    return ""


def _cannot(section: str, reason: str) -> list[Row]:
    what, goal = GOALS.get(section, (section, None))
    return [Row(what, reason, reason, goal)]


if __name__ == "__main__":
    main()
