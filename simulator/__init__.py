"""A stand-in for one vLLM 0.32 server, without a GPU.

It has the server's API, prefix cache and KV-cache events, and says made-up words.
"""
