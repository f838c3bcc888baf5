"""Names exchanged with Envoy: headers and dynamic metadata.

Which of the headers no client may set, and where, says `extproc.config.owned_headers`.
"""

# Endpoint Picker Protocol v1.0.0 (Gateway API inference extension, proposal 004).
DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
# Where Envoy puts the `response_attributes`: under the filter's name, by the attribute's name.
ATTRIBUTES = "envoy.filters.http.ext_proc"
UPSTREAM = "upstream.address"

SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

# KVSteer's: names the model of a request, so that a route can choose the cluster of that model.
MODEL = "x-kvsteer-model"

# KVSteer's: the share of the prompt that the fleet of each of several models holds, such as
# "model-a=0.97, model-b=0.03", for filters behind the router.
WARM = "x-kvsteer-warm"

# llm-d's: ip:port of the worker that computes the prompt, for the sidecar of the worker that
# answers, or for Envoy's own second request.
PREFILLER = "x-prefiller-host-port"

# KVSteer's, if Envoy sends a second request: the cluster for it, and the new end of its body.
PREFILL_CLUSTER = "x-kvsteer-prefill-cluster"
PREFILL_TAIL = "x-kvsteer-prefill-tail"

# llm-d's: host:port of a worker to pull a part of the prompt from, and of a worker that encodes
# media. KVSteer only removes the latter, since a sidecar would obey a client that sets it.
KV_SOURCE = "x-kv-cache-source-host-port"
ENCODERS = "x-encoder-hosts-ports"

# vLLM's, from 0.28 on: the priority of a request, which goes before the field of its body.
PRIORITY = "x-vllm-priority"

# vLLM's and SGLang's: the data-parallel rank of a request.
RANK = "x-data-parallel-rank"

# W3C's Trace Context: identifies the trace that a request belongs to.
TRACEPARENT = "traceparent"

# Envoy's and many clients': identifies a request, as Envoy's access log does.
REQUEST_ID = "x-request-id"

# The addresses through which a request came: each proxy appends that of its other end (Envoy's
# `use_remote_address`).
FORWARDED = "x-forwarded-for"

# Longer ids are cut.
MAX_ID_LETTERS = 128
