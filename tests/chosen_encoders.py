"""The choice of each tokenizer's encoder, made once for all tests of a process.

Loading fastokens and proving that its ids are the library's takes a tenth of a second of CPU time,
and every router in a test loads the same model. What an encoder remembers stays separate for each
router.
Tests of the choice itself call `choose` where it is defined.
"""

from unittest.mock import patch

from tokenizers import Tokenizer

from extproc.tokenizing import encoder_choice, tokens
from extproc.tokenizing.encoder_choice import EncoderChoice, RefusedCut
from extproc.tokenizing.text_encoder import TextEncoder

# A busy machine may need more time for a proof than the product takes.
PROOF_SECONDS = 600.0

_MADE: dict[str, EncoderChoice] = {}


def _chosen(
    tokenizer: Tokenizer, model: str, max_known_bytes: int, refused: RefusedCut | None = None
) -> EncoderChoice:
    if refused is not None:
        return encoder_choice.choose(
            tokenizer, model, max_known_bytes, refused=refused, proof_seconds=PROOF_SECONDS
        )
    source = tokenizer.to_str()
    if source not in _MADE:
        _MADE[source] = encoder_choice.choose(
            tokenizer, model, max_known_bytes, proof_seconds=PROOF_SECONDS
        )
    made = _MADE[source]
    texts = TextEncoder(made.texts.encoder, made.texts.cutter, max_known_bytes)
    return made._replace(texts=texts)


def choose_once() -> None:
    """Makes routers in this process reuse the first choice for each tokenizer."""
    patch.object(tokens, "choose", _chosen).start()
