"""A stand-in for one engine's server, without a GPU: vLLM, SGLang or TensorRT-LLM.

It has the server's API, prefix cache and KV-cache events, says made-up words, and misbehaves on
request. What tells engines and releases apart is in `dialects`.
"""
