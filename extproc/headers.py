"""Names exchanged with Envoy: headers and dynamic metadata."""

# Endpoint Picker Protocol v1.0.0 (Gateway API inference extension, proposal 004).
DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
# Where Envoy puts what `response_attributes` asks for: by the filter's name, then by its own.
ATTRIBUTES = "envoy.filters.http.ext_proc"
UPSTREAM = "upstream.address"

SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

# Ours: names the model of a request, so that a route can choose the cluster of that model.
# Set only where more than one model is configured; never taken from a client.
MODEL = "x-kvsteer-model"
