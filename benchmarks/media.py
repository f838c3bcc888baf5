"""The cost of a request with images on the event loop, from its body to its query.

    python benchmarks/media.py [--quick] [--json FILE]

Every request waits for the loop, so only the CPU time of its thread counts here; large bodies are
read and hashed in another. The reference decodes the same JSON on the loop.
"""

import asyncio
import base64
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
from measure import Figure, Goal, Row
from rows import arguments, run

from extproc.config.schema import Model
from extproc.media.knowledge import MediaKnowledge
from extproc.observing.decisions import Timeline
from extproc.requests.request import Head, Models, RoutingRequest
from extproc.serving.queries import Queries
from extproc.tokenizing.prompt_tokens import PromptTokens
from extproc.tokenizing.tokens import Tokenizer

TINY = Path(__file__).resolve().parents[1] / "kvtools" / "simulator" / "tiny_model"
HEAD = Head("POST", "/v1/chat/completions", None)
FULL_ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS = 25, 7, 1

# Megabytes of base64, and in how many images.
BODIES: Sequence[tuple[float, int]] = ((5, 20), (5, 1), (30, 100), (0.5, 1_000))
GOAL = Goal(1.0, "<= 1 ms", of_ratio=False)

# What a template writes for an image; the tiny model's own takes texts only.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|endoftext|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)


def body(seed: int, megabytes: float, images: int) -> bytes:
    """Returns a conversation with images, new ones for each seed."""
    rng, each = Random(seed), int(megabytes * 750_000 / images)
    data = [base64.b64encode(rng.randbytes(each)).decode() for _ in range(images)]
    urls = [f"data:image/png;base64,{one}" for one in data]
    text = {"type": "text", "text": "Look at this. " * 20}
    parts = [[text, {"type": "image_url", "image_url": {"url": url}}] for url in urls]
    messages = [{"role": "user", "content": part} for part in parts]
    return json.dumps({"model": "tiny", "messages": messages}).encode()


async def measured(queries: Queries, bodies: Sequence[bytes]) -> tuple[Figure, Figure]:
    """Returns the milliseconds of CPU on the loop of each request, and of decoding its JSON."""
    ours, reference = [], []
    for one in bodies:
        began = time.thread_time()
        query = await queries.make_query(RoutingRequest(HEAD, one), Timeline.begin(time.monotonic))
        ours.append(1_000 * (time.thread_time() - began))
        assert query.media is not None, query.reason
        began = time.thread_time()
        msgspec.json.decode(one)
        reference.append(1_000 * (time.thread_time() - began))
    return Figure(ours[1:]), Figure(reference[1:])


def rows(queries: Queries, rounds: int) -> list[Row]:
    """Returns a row for each kind of body."""
    found = []
    for megabytes, images in BODIES:
        bodies = [body(seed, megabytes, images) for seed in range(rounds + 1)]
        ours, reference = asyncio.run(measured(queries, bodies))
        what = f"{megabytes:g} MB in {images} images, CPU on the loop (ms)"
        found.append(Row(what, ours, reference, GOAL))
    return found


def main() -> None:
    """Measures all kinds of bodies."""
    parser = arguments("Benchmark of requests with images.", "fewer rounds, within two minutes")
    with run(parser, __doc__ or "") as one, tempfile.TemporaryDirectory() as directory:
        template = Path(directory) / "template.jinja"
        template.write_text(TEMPLATE)
        tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY), chat_template=str(template)))
        assert tokenizer is not None
        tokens = PromptTokens({"tiny": tokenizer}, 30.0)
        media = MediaKnowledge(b"a key")
        queries = Queries(Models([Model("tiny")]), tokens, media=media)
        one.add(rows(queries, one.amount(SMOKE_ROUNDS, QUICK_ROUNDS, FULL_ROUNDS)))
        tokens.close()


if __name__ == "__main__":
    main()
