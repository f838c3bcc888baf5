"""The token ids of chats are those of vLLM's own Rust front end, and what was recorded still holds.

It needs no engine: KVSTEER_VLLM_RS names the program of vLLM's wheel, or KVSTEER_VLLM_PYTHON a
Python with that wheel.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from extproc.base.engine import RUST, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.dialect import dialect_of
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.tokens import Tokenizer
from tests.engines.code_models import gpt_oss, has_harmony
from tests.engines.rust_renderer import make_model, rendering, why_not
from tests.extproc.rust.corpus import OF_GPT_OSS, REQUESTS, USER, Body, planted

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is there"),
]

RECORDED = Path("tests/extproc/rust")
DIALECT = dialect_of(Engine(VLLM, Release(0, 33), RUST))
FAMILIES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_v41": "DeepseekV41ForCausalLM",
}
TEXTS = [
    "I'LL say it isn't SO: 1234567 \u0967\u0968 x\u00b2 H2O a_b, f(x)!=0;\r\n\n  two  spaces\t",
    "\u092e\u0947\u0930\u0940 \u0e44\u0e17\u0e22 cafe\u0301 \u6771\u4eac42 \U0001f469\u200d end \n",
    "<|im_start|>user\n<|im_end|>" * 3,
    "word and more words. " * 2_000,
]


@pytest.mark.parametrize("name", ["text", "parts", *FAMILIES])
def test_ids_are_the_front_end_s_own(tmp_path: Path, name: str) -> None:
    family = FAMILIES.get(name, "")
    template = "" if family else (RECORDED / f"{name}.jinja").read_text()
    directory = make_model(tmp_path, template, name if family else "", family)
    accepted, same = compared(directory, [*REQUESTS, *planted()])
    assert same >= 0.97 * accepted  # what is refused is in the corpus for that


@pytest.mark.skipif(not has_harmony(), reason="no openai_harmony in KVSTEER_VLLM_PYTHON")
def test_ids_of_gpt_oss_are_the_front_end_s_own(tmp_path: Path) -> None:
    directory = gpt_oss(tmp_path / "gpt-oss").directory
    accepted, same = compared(directory, [*REQUESTS, *OF_GPT_OSS, *planted()])
    assert same >= 0.95 * accepted


def compared(directory: Path, bodies: Sequence[Body]) -> tuple[int, int]:
    """Returns how many requests the front end accepts, and how many of these have its ids here.

    The others are refused here: ids that differ are a failure.
    """
    tokenizer = Tokenizer.load(Model(name="tiny", tokenizer=str(directory)))
    assert tokenizer is not None
    texts = [{"messages": [{"role": "user", "content": one}]} for one in TEXTS]
    accepted, same = 0, 0
    with rendering(directory) as renderer:
        for body in [*bodies, *texts]:
            theirs = renderer.ids(body)
            if theirs is None:
                continue
            accepted += 1
            try:
                read = parse(CHAT_PATH, json.dumps(body).encode(), lambda _: DIALECT)
                ours = tokenizer.encode(read.prompts[0])
            except RequestError:
                continue
            assert ours.tolist() == theirs, body
            same += 1
    return accepted, same


def test_recorded_snippets_are_what_it_still_writes(tmp_path: Path) -> None:
    snippets = json.loads((RECORDED / "vllm_0.33.0_minijinja.json").read_text())
    directory = make_model(tmp_path, "{{ messages }}")
    tokenizer = Tokenizer.load(Model(name="tiny", tokenizer=str(directory)))
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    more = {"messages": messages, "chat_template_kwargs": snippets["values"]}
    with rendering(directory, "--trust-request-chat-template") as renderer:
        for source, text in (snippets["rendered"] | snippets["not_keyed"]).items():
            if "_token" in source:  # the recorded model had other special tokens
                continue
            ids = renderer.ids({**more, "chat_template": f"[{source}]"})
            assert ids is not None
            assert tokenizer.text_of(ids) == f"[{text}]", source


def test_front_end_refuses_what_is_never_asked(tmp_path: Path) -> None:
    with rendering(make_model(tmp_path, "{{ messages }}")) as renderer:
        assert renderer.ids({"messages": [USER], "n": 2}) is None
