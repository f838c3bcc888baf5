"""A stand-in for one engine's server, without a GPU: vLLM, SGLang or TensorRT-LLM.

It has the server's API, prefix cache and KV-cache events, answers with made-up words, and
misbehaves on request. The differences between engines and releases are in `dialects`.
"""
