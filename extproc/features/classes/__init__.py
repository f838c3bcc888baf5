"""Classes of requests: `policy.classes`."""
