from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VllmRequest(_message.Message):
    __slots__ = ("tokenized", "text", "sampling_params", "mm_inputs", "media_refs", "extra_mm_inputs")
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    MM_INPUTS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_REFS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_MM_INPUTS_FIELD_NUMBER: _ClassVar[int]
    tokenized: TokenIds
    text: bytes
    sampling_params: VllmSampling
    mm_inputs: bytes
    media_refs: bytes
    extra_mm_inputs: bytes
    def __init__(self, tokenized: _Optional[_Union[TokenIds, _Mapping]] = ..., text: _Optional[bytes] = ..., sampling_params: _Optional[_Union[VllmSampling, _Mapping]] = ..., mm_inputs: _Optional[bytes] = ..., media_refs: _Optional[bytes] = ..., extra_mm_inputs: _Optional[bytes] = ...) -> None: ...

class VllmSampling(_message.Message):
    __slots__ = ("prompt_logprobs", "truncate_prompt_tokens")
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_logprobs: int
    truncate_prompt_tokens: int
    def __init__(self, prompt_logprobs: _Optional[int] = ..., truncate_prompt_tokens: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("input_ids", "query_token_ids")
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    query_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, input_ids: _Optional[_Iterable[int]] = ..., query_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SglangRequest(_message.Message):
    __slots__ = ("tokenized", "mm_inputs", "return_logprob", "logprob_start_len", "input_embeds", "lora_id")
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    MM_INPUTS_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_START_LEN_FIELD_NUMBER: _ClassVar[int]
    INPUT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    tokenized: TokenIds
    mm_inputs: bytes
    return_logprob: bool
    logprob_start_len: int
    input_embeds: _containers.RepeatedScalarFieldContainer[float]
    lora_id: str
    def __init__(self, tokenized: _Optional[_Union[TokenIds, _Mapping]] = ..., mm_inputs: _Optional[bytes] = ..., return_logprob: _Optional[bool] = ..., logprob_start_len: _Optional[int] = ..., input_embeds: _Optional[_Iterable[float]] = ..., lora_id: _Optional[str] = ...) -> None: ...

class TrtllmRequest(_message.Message):
    __slots__ = ("tokenized", "lora_config", "prompt_tuning_config", "multimodal_input", "cache_salt_id")
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    LORA_CONFIG_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TUNING_CONFIG_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_INPUT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_ID_FIELD_NUMBER: _ClassVar[int]
    tokenized: TokenIds
    lora_config: bytes
    prompt_tuning_config: bytes
    multimodal_input: bytes
    cache_salt_id: int
    def __init__(self, tokenized: _Optional[_Union[TokenIds, _Mapping]] = ..., lora_config: _Optional[bytes] = ..., prompt_tuning_config: _Optional[bytes] = ..., multimodal_input: _Optional[bytes] = ..., cache_salt_id: _Optional[int] = ...) -> None: ...

class TokenspeedRequest(_message.Message):
    __slots__ = ("tokenized", "mm_inputs")
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    MM_INPUTS_FIELD_NUMBER: _ClassVar[int]
    tokenized: TokenspeedTokenIds
    mm_inputs: bytes
    def __init__(self, tokenized: _Optional[_Union[TokenspeedTokenIds, _Mapping]] = ..., mm_inputs: _Optional[bytes] = ...) -> None: ...

class TokenspeedTokenIds(_message.Message):
    __slots__ = ("input_ids",)
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, input_ids: _Optional[_Iterable[int]] = ...) -> None: ...
