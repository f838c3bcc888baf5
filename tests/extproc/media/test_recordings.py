"""Predictions for requests with images, audio and video equal what real engines had cached."""

from itertools import count

import pytest

from extproc.base.engine import SGLANG, Engine, PromptArguments, Release
from extproc.media.learning import GRACE_SECONDS
from extproc.media.memory import MediaMemory
from extproc.requests.dialect import model_dialects
from tests.extproc.media.replaying import HERE, Replay, Replayed, requests_in

MODELS = ("llava", "qwen2vl")

# Models' directories, and recordings. The tokenizer and template of the audio model are those of
# qwen2vl.
RECORDINGS = (
    ("llava", "llava"),
    ("qwen2vl", "qwen2vl"),
    ("qwen2vl", "qwen2vl_video"),
    ("qwen2vl", "qwen2audio"),
)


def replayed(model: str, file: str, *, reads_usage: bool) -> list[Replayed]:
    """Returns the requests of a recording that the engine answered."""
    replay = Replay(HERE / model, reads_usage=reads_usage)
    taken = map(replay.take, requests_in(HERE / f"vllm_0.32.0_{file}.jsonl.gz"))
    return [one for one in taken if one is not None]


@pytest.mark.parametrize(("model", "file"), RECORDINGS)
@pytest.mark.parametrize("reads_usage", [False, True])
def test_predictions_equal_what_a_real_engine_had_cached(
    model: str, file: str, reads_usage: bool
) -> None:
    found = replayed(model, file, reads_usage=reads_usage)
    assert len(found) == 100
    assert not [one.scenario for one in found if one.predicted > one.cached]
    assert sum(one.predicted == one.cached for one in found) >= 98


@pytest.mark.parametrize("model", MODELS)
def test_predictions_hold_with_urls_equal_sizes_and_arguments(model: str) -> None:
    """What is behind a URL changed in a third of its uses: it only counts as uncertain."""
    found = replayed(model, f"{model}_more", reads_usage=False)
    medias = [(one, one.query.media) for one in found]
    exact = [one for one, of in medias if of is None or all(item.is_exact for item in of.items)]
    assert len(found) > len(exact) > len(found) / 3
    assert not [one.scenario for one in found if one.predicted > one.cached]
    assert all(one.predicted == one.cached for one in exact)
    assert sum(one.possible == one.cached for one in found) >= 0.98 * len(found)


def test_predictions_equal_what_sglang_had_cached() -> None:
    """The requests went, one by one, through the conversions, the image processor and the cache of
    SGLang 0.5.23: chat completions, messages and responses, with images in turns and in results of
    tools.

    Only what the first request with two images finds is uncertain.
    """
    engine, seconds = Engine(SGLANG, Release(0, 5, 23)), count(0.0, 2 * GRACE_SECONDS)
    dialects = model_dialects({"w": engine}, (), {"w": PromptArguments()})
    replay = Replay(HERE / "qwen2vl", dialects=dialects, monotonic=lambda: next(seconds))
    taken = map(replay.take, requests_in(HERE / "sglang_0.5.23_qwen2vl.jsonl.gz"))
    found = [one for one in taken if one is not None]
    assert len(found) == 110
    assert not [one.scenario for one in found if one.predicted > one.cached]
    assert sum(one.predicted == one.cached for one in found) >= 108
    assert all(one.possible == one.cached for one in found)


def test_known_image_is_known_after_a_restart() -> None:
    one, other = Replay(HERE / "qwen2vl"), Replay(HERE / "qwen2vl")
    requests = list(requests_in(HERE / "vllm_0.32.0_qwen2vl.jsonl.gz"))
    for request in requests[:50]:
        one.take(request)
    for piece in MediaMemory(one.knowledge).saved():
        MediaMemory(other.knowledge).restore(piece)
    before = [one.query(request["body"]) for request in requests[50:]]
    after = [other.query(request["body"]) for request in requests[50:]]
    assert [query.media for query in after if query.media and query.media.is_known]
    assert [q.prompts[0].tokens for q in after] == [q.prompts[0].tokens for q in before]
