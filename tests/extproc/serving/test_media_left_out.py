"""Requests with media to models that are served without them."""

import json
from pathlib import Path
from time import monotonic

from extproc.config.schema import Model
from extproc.observing.decisions import Timeline
from extproc.requests.costly_json import INLINE_BYTES
from extproc.requests.dialect import NEWEST, ModelDialects
from extproc.requests.request import CHAT_PATH, Head, Models, RoutingRequest
from extproc.routing.inputs.query import Query
from extproc.serving.queries import Queries
from extproc.tokenizing.prompt_tokens import PromptTokens
from tests.extproc.tokenizing.test_families import gpt_oss

TEXT: dict[str, object] = {"type": "text", "text": "look"}


async def query(directory: Path, *parts: dict[str, object]) -> Query:
    tokens = PromptTokens({"m": gpt_oss(directory)}, 60.0)
    queries = Queries(Models([Model("m")]), tokens, lambda _: ModelDialects(NEWEST))
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    request = RoutingRequest(Head("POST", CHAT_PATH, None), json.dumps(body).encode())
    found = await queries.make_query(request, Timeline.begin(monotonic))
    tokens.close()
    return found


async def test_gpt_oss_is_keyed_in_full_as_if_its_images_were_empty_texts(tmp_path: Path) -> None:
    for bytes_of_image in (8, INLINE_BYTES):
        url = {"url": "data:image/png;base64," + "A" * bytes_of_image}
        found = await query(tmp_path, TEXT, {"type": "image_url", "image_url": url}, TEXT)
        plain = await query(tmp_path, TEXT, TEXT)
        assert (found.reason, found.media) == (plain.reason, None)
        assert found.prompts == plain.prompts != []
