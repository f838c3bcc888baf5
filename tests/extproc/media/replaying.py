"""Replays recordings of real engines: each request is read, looked up and learned from."""

import asyncio
import base64
import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from extproc.config.schema import Model
from extproc.media.knowledge import MediaKnowledge
from extproc.observing.decisions import Timeline
from extproc.requests.dialect import NEWEST, ModelDialects
from extproc.requests.request import Head, Models, RoutingRequest
from extproc.routing.inputs.query import Query
from extproc.serving.queries import Queries
from extproc.tokenizing.prompt_tokens import PromptTokens
from extproc.tokenizing.tokens import Tokenizer
from kvstate.index.index import Index
from kvstate.overlap import Overlap, within
from kvstate.steps import finished

HERE = Path(__file__).parent / "recorded"
WORKER, MODEL = "w", "tiny"
CHAT = "/v1/chat/completions"
SECRET = 0x5EED


def requests_in(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the requests of a recording."""
    with gzip.open(file, "rt") as lines:
        yield from (one for one in map(json.loads, lines) if one["kind"] == "request")


class Replayed(NamedTuple):
    """A request: its query, the certain tokens that were predicted, those that were cached, and
    what was predicted with uncertain tokens.
    """

    scenario: str
    query: Query
    predicted: int
    cached: int
    possible: int


class Replay:
    """A router's knowledge of one engine.

    reads_usage: whether it reads what the engine reports. dialects: the engine's dialect.
    monotonic: returns seconds.
    """

    def __init__(
        self,
        directory: Path,
        *,
        reads_usage: bool = False,
        dialects: ModelDialects | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        dialects = dialects or ModelDialects(NEWEST)
        tokenizer = Tokenizer.load(Model(MODEL, tokenizer=str(directory)))
        assert tokenizer is not None
        self.index = Index(SECRET)
        self.owner = self.index.add(WORKER, 0, MODEL)
        self.owner.trust(trusted=True)
        self.knowledge = MediaKnowledge(b"key", self.index.media_ids, monotonic)
        self.index.listen(self.knowledge.learning)
        self._reads_usage = reads_usage
        self._queries = Queries(
            Models([Model(MODEL)]),
            PromptTokens({MODEL: tokenizer}, 60.0),
            lambda _: dialects,
            self.knowledge,
        )

    def query(self, body: dict[str, Any], path: str = CHAT) -> Query:
        """Returns the query for a body; a busy machine may need several renderings to end one."""
        asked = RoutingRequest(Head("POST", path, None), json.dumps(body).encode())
        while True:
            made = self._queries.make_query(asked, Timeline.begin(time.monotonic))
            query = asyncio.run(made)
            if query.reason != "template_too_slow":
                return query

    def held(self, query: Query) -> Overlap:
        """Returns what the worker holds of the prompt of a query."""
        (prompt,) = query.prompts
        overlap = self.index.overlaps(prompt).get(WORKER, Overlap(1))
        sure = prompt.sure_tokens
        return overlap if sure is None else within(overlap, sure)

    def take(self, request: dict[str, Any]) -> Replayed | None:
        """Replays a request; returns None if the engine refused it."""
        query = self.query({**request["body"], "model": MODEL}, request.get("path", CHAT))
        held, learning = self.held(query), self.knowledge.learning
        media = query.media
        prompt = None if media is None else media.prompt
        if media is not None and prompt is not None:
            learning.begin(WORKER, prompt, is_known=media.is_known)
        for frame in request["frames"]:
            finished(self.owner.applying(base64.b64decode(frame["payload_b64"])))
        if request["status"] != 200:
            return None
        usage = request["response"]["usage"]
        if prompt is not None:
            learning.end(prompt)
            if self._reads_usage:
                learning.count(prompt, usage["prompt_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        certain, uncertain = held.certain_tokens, held.uncertain_tokens
        return Replayed(request["scenario"], query, certain, cached, certain + uncertain)
