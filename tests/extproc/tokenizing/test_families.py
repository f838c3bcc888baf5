import json
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer as Tokenizers

from extproc.base.engine import RUST, VLLM, Engine, Release
from extproc.base.errors import RequestError, StartError
from extproc.config.schema import Model
from extproc.renderers.harmony_format import CONTROLS
from extproc.renderers.kimi_k3 import CONTROLS as KIMI_K3
from extproc.requests.dialect import NEWEST, dialect_of
from extproc.requests.prompt import DAYS, EVEN_DAY, IN_CODE, INLINE_SYSTEM, ODD_DAY, Chat
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.encoder_choice import choose
from extproc.tokenizing.families import CodeRendering
from extproc.tokenizing.segment_encoder import segment_texts
from extproc.tokenizing.tokens import ChatTemplates, Tokenizer
from extproc.tokenizing.vocabulary import Vocabulary
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.renderers.test_segments import MARKS
from tests.extproc.small_models import write_model
from tests.extproc.tokenizing.test_segment_encoder import Pairs

CHAT = Chat([{"role": "user", "content": "hi"}], {})
RUST_DIALECT = dialect_of(Engine(VLLM, Release(0, 33), RUST))
IMAGE = {"role": "user", "content": [{"type": "image"}]}


def load(directory: Path, files: dict[str, str]) -> Tokenizer:
    """The tokenizer of the tiny model with other files beside it, a template among them."""
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    for name, content in {"chat_template.jinja": "hello", **files}.items():
        (directory / name).write_text(content)
    override = str(directory / "chat_template.jinja")
    found = Tokenizer.load(Model("m", tokenizer=str(directory), chat_template=override))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"architectures": ["InklingForCausalLM"]}'},
    ],
)
def test_template_has_no_effect_where_the_engine_renders_in_code(
    tmp_path: Path, files: dict[str, str]
) -> None:
    with pytest.raises(RequestError, match="no_chat_template"):
        load(tmp_path, files).encode(CHAT)


@pytest.mark.parametrize(
    "config", ["{}", '{"architectures": ["LlamaForCausalLM", []]}', '{"architectures": 5}']
)
def test_other_models_have_templates(tmp_path: Path, config: str) -> None:
    tokenizer = load(tmp_path, {"config.json": config})
    assert tokenizer.text_of(tokenizer.encode(CHAT)) == "hello"
    assert not tokenizer.start(CHAT).forms & IN_CODE


def test_deeply_nested_config_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"config.json: nested too deeply"):
        load(tmp_path, {"config.json": "[" * 200_000})


def gpt_oss(directory: Path, **ids: int) -> Tokenizer:
    """A small tokenizer with the control tokens of gpt-oss. ids: other ones, by name."""
    controls = {name: ids.get(name.strip("<|>"), number) for name, number in CONTROLS.items()}
    letters = {chr(number): number for number in range(33, 127)} | {"\u0120": 0, "\u010a": 1}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": name, "special": True, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}
            for name, number in controls.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "vocab": {**letters, **controls}, "merges": []},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "config.json").write_text('{"architectures": ["GptOssForCausalLM"]}')
    (directory / "chat_template.jinja").write_text("{{ messages[2].role }}")
    found = Tokenizer.load(Model("m", tokenizer=str(directory)))
    assert found is not None
    return found


def test_gpt_oss_is_rendered_in_segments(tmp_path: Path) -> None:
    tokenizer = gpt_oss(tmp_path)
    chat = msgspec.structs.replace(CHAT, dialect=NEWEST, sent=CHAT.messages)
    ids = tokenizer.encode(chat)
    assert tokenizer.text_of(ids).endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert ids[0] == CONTROLS["<|start|>"]
    with pytest.raises(RequestError, match="unsupported_control_text"):
        tokenizer.encode(
            msgspec.structs.replace(chat, sent=[{**CHAT.messages[0], "content": "<|end|>"}])
        )
    assert (tokenizer.renders_in_code, tokenizer.is_shown_by_tokenize) == (True, False)


def test_gpt_oss_alone_has_a_form_of_the_day_for_a_rust_front_end(tmp_path: Path) -> None:
    body = json.dumps({"messages": CHAT.messages}).encode()
    (chat,) = parse(CHAT_PATH, body, lambda _: RUST_DIALECT).prompts
    tokenizer = gpt_oss(tmp_path)
    days = tokenizer.start_forms, tokenizer.start(chat).forms & DAYS, tokenizer.start_forms
    assert days[1] in days[::2]  # unless midnight passes between them
    assert set(days) <= {EVEN_DAY, ODD_DAY}
    other = load(tmp_path, {"config.json": "{}"})
    assert other.start_forms == 0


def test_gpt_oss_keeps_later_systems_if_its_template_does(tmp_path: Path) -> None:
    turns = [*CHAT.messages, {"role": "system", "content": "later"}, *CHAT.messages]
    chat = Chat(turns, {}, dialect=NEWEST, forms=INLINE_SYSTEM, sent=turns)
    tokenizer = gpt_oss(tmp_path)
    kept = tokenizer.text_of(tokenizer.encode(chat))
    assert "<|start|>developer<|message|># Instructions\n\nlater<|end|><|start|>user" in kept
    assert kept.index("later") > kept.index("hi")


def test_gpt_oss_with_other_control_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no_chat_template"):
        gpt_oss(tmp_path, start=300_000).encode(CHAT)


def kimi_k3(directory: Path, *names: str) -> Tokenizer:
    """A small Kimi K3 with these control tokens."""
    write_model("kimi-k2", directory)
    named = {str(1_200 + place): {"content": name} for place, name in enumerate(names)}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    config = {"architectures": ["KimiK3ForConditionalGeneration"]}
    (directory / "config.json").write_text(json.dumps(config))
    found = Tokenizer.load(Model("m", tokenizer=str(directory)))
    assert found is not None
    return found


def test_kimi_k3_is_rendered_in_segments(tmp_path: Path) -> None:
    tokenizer = kimi_k3(tmp_path, *KIMI_K3)
    chat = Chat(CHAT.messages, {}, dialect=NEWEST)
    text = tokenizer.text_of(tokenizer.encode(chat))
    assert '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>' in text
    hostile = [{**CHAT.messages[0], "content": "<|open|>"}]
    with pytest.raises(RequestError, match="unsupported_control_text"):
        tokenizer.encode(msgspec.structs.replace(chat, messages=hostile))


def test_kimi_k3_without_its_control_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no_chat_template"):
        kimi_k3(tmp_path, *KIMI_K3[1:]).encode(CHAT)


class Fixed:
    """Renders every conversation alike: one text, or two texts around a control token."""

    is_shown_by_tokenize = True
    drops_media = False

    def __init__(self, *, in_segments: bool) -> None:
        self.marks = MARKS if in_segments else None

    def render(self, chat: Chat, *, budget_seconds: float) -> tuple[str, int]:
        return (MARKS.joined(["ab", 7, "c"]) if self.marks else "hello"), 0


def tokenizer_of(code: CodeRendering) -> Tokenizer:
    library = Tokenizers.from_file(str(TINY_MODEL / "tokenizer.json"))
    return Tokenizer(
        choose(library, "tiny", 1 << 20), ChatTemplates({}), Vocabulary(library, forms=0), code
    )


def test_segments_are_tokenized_by_their_own_encoder() -> None:
    code = CodeRendering(Fixed(in_segments=True), segment_texts(Pairs(), MARKS, 1 << 20))
    tokenizer = tokenizer_of(code)
    pairs = Pairs().ids(["ab", "c"])
    assert tokenizer.encode(CHAT).tolist() == [*pairs[0], 7, *pairs[1]]
    assert tokenizer.start(CHAT).forms & IN_CODE


def test_text_of_a_renderer_is_tokenized_by_the_models_own_encoder() -> None:
    tokenizer = tokenizer_of(CodeRendering(Fixed(in_segments=False)))
    assert tokenizer.text_of(tokenizer.encode(CHAT)) == "hello"
    assert tokenizer.start(CHAT).forms & IN_CODE


@pytest.mark.parametrize("in_segments", [True, False])
def test_conversation_with_media_is_refused(in_segments: bool) -> None:
    texts = segment_texts(Pairs(), MARKS, 1 << 20) if in_segments else None
    tokenizer = tokenizer_of(CodeRendering(Fixed(in_segments=in_segments), texts))
    with pytest.raises(RequestError, match="unsupported_media"):
        tokenizer.encode(Chat([IMAGE], {}, has_media=True))
