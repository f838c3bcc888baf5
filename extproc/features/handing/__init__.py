"""Token ids that go with requests: `policy.hand_tokens`."""
