"""From a request's body to the cached tokens that a real engine reported for it."""

import base64
import json
from pathlib import Path
from random import Random

from extproc.config.schema import Model
from extproc.requests.request import PLAIN_REQUEST, parse
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from extproc.tokenizing.tokens import Tokenizer
from kvstate.index.index import Index
from kvstate.overlap import Prompt
from kvstate.steps import finished
from kvtools.simulator.settings import TINY_MODEL

RECORDING = Path(__file__).parents[2] / "wire" / "vllm_0.32.0_cached_tokens.jsonl"


def test_predictions_from_bodies_equal_the_report_of_the_engine() -> None:
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL)))
    assert tokenizer is not None
    index = Index(1)
    owner = index.add("w", 0, "tiny")
    owner.trusted = True
    workers = [Candidate("w", "10.0.0.1:8000")]
    compared = 0
    for entry in map(json.loads, RECORDING.read_text().splitlines()):
        details = ((entry.get("response") or {}).get("usage") or {}).get("prompt_tokens_details")
        if details is not None:
            request = parse(entry["path"], json.dumps(entry["body"]).encode())
            salt = request.cache_salt
            prompts = [Prompt("tiny", tokenizer.encode(one), None, salt) for one in request.prompts]
            held = [index.overlaps(prompt) for prompt in prompts]
            snapshot = Snapshot(workers, held, lambda *_: Load(), "cost", 0)
            decision = decide(PLAIN_REQUEST, Query("tiny", prompts), snapshot, 0.0, Random(1))
            assert decision.basis.certain_tokens == details["cached_tokens"], entry["scenario"]
            compared += 1
        for frame in entry.get("frames") or []:
            finished(owner.applying(base64.b64decode(frame["payload_b64"])))
    assert compared == 110
