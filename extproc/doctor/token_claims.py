"""An engine's token ids held against ours."""

from collections.abc import Iterable

from extproc.doctor.findings import About, Finding
from kvstate.events import Tokens

# Words, numbers, spaces, code, accents, other scripts: where tokenizers differ, they differ here.
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "    for n in range(1234567890):\n\t\treturn {'a': n ** 2}  # 3.14159\n\n",
    "naïve café, Straße, 東京 도쿄 Москва \U0001f680",
)

Claim = tuple[str, Tokens, Tokens]  # of what; the engine's ids, ours


def judge_tokens(about: About, claims: Iterable[Claim], witness: str) -> Finding:
    """Whether an engine's ids are ours.

    witness: what told the engine's.
    """
    count = 0
    for what, theirs, ours in claims:
        count += 1
        at = next(
            (at for at, pair in enumerate(zip(theirs, ours, strict=False)) if _differ(pair)), None
        )
        if at is not None:
            says = f"of {what}, token {at} is {theirs[at]} in the engine and {ours[at]} here"
            return about.wrong("tokens-differ", f"{says}, by {witness}")
        if len(theirs) != len(ours):
            says = f"of {what}, the engine has {len(theirs)} tokens and we have {len(ours)}"
            return about.wrong("tokens-differ", f"{says}, by {witness}")
    return about.right("tokens", f"the engine's are ours in {count} of {count} texts, by {witness}")


def _differ(pair: tuple[int, int]) -> bool:
    return pair[0] != pair[1]
