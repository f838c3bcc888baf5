"""How long a model would compute."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """Speeds in tokens per second; infinity means no delay at all."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    def prefill_seconds(self, uncached_tokens: int) -> float:
        """Until the first token, for a prompt of which this much is not cached."""
        return uncached_tokens / self.prefill_tokens_per_second

    @property
    def decode_seconds(self) -> float:
        """Between two tokens of an answer."""
        return 1 / self.decode_tokens_per_second
