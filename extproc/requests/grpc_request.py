"""Generation requests over gRPC: they carry token ids, so they are keyed without a tokenizer.

Sources: gRPC over HTTP/2, "Length-Prefixed-Message"; the services of smg-grpc-proto 0.4.14 and
0.4.28; proto/kvsteer_generate.proto has the fields that are read here. Requests name no model.
"""

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from extproc.base.errors import RequestError
from extproc.pb.kvsteer_generate_pb2 import (
    SglangRequest,
    TokenspeedRequest,
    TrtllmRequest,
    VllmRequest,
)
from extproc.requests.prompt import InferenceRequest
from kvstate.overlap import Tokens

_PREFIX_BYTES = 5

# More than any model accepts.
MAX_TOKENS = 1_048_576

_IDS_AT_ONCE = 16_384

# Token ids, and whether the engine reads its cache for them.
GrpcPrompt = tuple[Tokens, bool]


def parse(path: str, content: bytes) -> InferenceRequest:
    """Parses the body of a request to one of `PATHS`: one message with its prefix.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
    """
    ids, reads_cache = _read(path, content)
    return InferenceRequest(None, [ids], reads_cache=reads_cache)


def ids_of(path: str, content: bytes) -> Tokens:
    """Returns the token ids of such a request.

    Raises:
        RequestError: as `parse`.
    """
    return _read(path, content)[0]


def _read(path: str, content: bytes) -> GrpcPrompt:
    message = _message(content)
    try:
        read = PATHS[path](message)
    except DecodeError:
        raise RequestError("bad_request") from None
    if not read[0]:
        raise RequestError("empty_prompt")
    return read


def _message(content: bytes) -> bytes:
    if len(content) < _PREFIX_BYTES:
        raise RequestError("bad_request")
    compressed, length = struct.unpack_from(">BI", content)
    if compressed:
        raise RequestError("unsupported_compression")
    if len(content) != _PREFIX_BYTES + length:
        raise RequestError("bad_request")
    return content[_PREFIX_BYTES:]


def _vllm(message: bytes) -> GrpcPrompt:
    request = VllmRequest.FromString(message)
    sampling = request.sampling_params
    if sampling.HasField("truncate_prompt_tokens"):
        raise RequestError("unsupported_truncation")
    if _has(request, "mm_inputs", "media_refs", "extra_mm_inputs"):
        raise RequestError("unsupported_media")
    if _has(request, "text"):
        raise RequestError("unsupported_text")  # gateways send token ids; a text is not checked
    return _ids(request.tokenized.input_ids), not _has(sampling, "prompt_logprobs")


def _sglang(message: bytes) -> GrpcPrompt:
    request = SglangRequest.FromString(message)
    if _has(request, "mm_inputs"):
        raise RequestError("unsupported_media")
    if request.input_embeds:
        raise RequestError("unsupported_embeddings")
    if request.lora_id:
        raise RequestError("unsupported_lora")  # an id of the engine's; events name the adapter
    # the request wants the probabilities of the prompt from logprob_start_len on
    reads_cache = not request.return_logprob or request.logprob_start_len < 0
    return _ids(request.tokenized.input_ids), reads_cache


def _trtllm(message: bytes) -> GrpcPrompt:
    request = TrtllmRequest.FromString(message)
    if _has(request, "multimodal_input") or request.tokenized.query_token_ids:
        raise RequestError("unsupported_media")
    if _has(request, "prompt_tuning_config"):
        raise RequestError("unsupported_embeddings")
    if _has(request, "lora_config"):
        raise RequestError("unsupported_lora")
    if _has(request, "cache_salt_id"):
        raise RequestError("unsupported_cache_salt")  # a number, which events do not carry
    return _ids(request.tokenized.input_ids), True


def _tokenspeed(message: bytes) -> GrpcPrompt:
    request = TokenspeedRequest.FromString(message)
    if _has(request, "mm_inputs"):
        raise RequestError("unsupported_media")
    return _ids(request.tokenized.input_ids), True


def _ids(ids: Sequence[int]) -> Tokens:
    """Returns token ids in a buffer; yields to other threads between steps."""
    if len(ids) > MAX_TOKENS:
        raise RequestError("too_many_parts")
    found = array("I")
    for at in range(0, len(ids), _IDS_AT_ONCE):
        found.extend(ids[at : at + _IDS_AT_ONCE])
    return found


def _has(request: Any, *fields: str) -> bool:
    return any(request.HasField(field) for field in fields)


# The message of each path, and how to read its token ids.
PATHS: dict[str, Callable[[bytes], GrpcPrompt]] = {
    "/vllm.grpc.engine.VllmEngine/Generate": _vllm,
    "/vllm.grpc.engine.VllmEngine/Embed": _vllm,
    "/mlx.grpc.engine.MlxEngine/Generate": _vllm,
    "/sglang.grpc.scheduler.SglangScheduler/Generate": _sglang,
    "/trtllm.TrtllmService/Generate": _trtllm,
    "/trtllm.TrtllmService/Embed": _trtllm,
    "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/Generate": _tokenspeed,
}
