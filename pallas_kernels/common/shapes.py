"""Attention shapes of real models, by name: one list for tests, benchmarks and tuning alike."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The sizes of one model's attention.

    >>> AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, num_layers=32).group
    4
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    window: int | None = None
    soft_cap: float | None = None
    rank: int | None = None  # of latent rows, of which so many numbers are the values; head_dim is their width

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


# From the models' published configurations.
SHAPES = {
    "llama3-8b": AttentionShape(32, 8, 128, 32),
    "llama3-70b": AttentionShape(64, 8, 128, 80),
    "llama2-7b": AttentionShape(32, 32, 128, 32),
    "llama3.2-1b": AttentionShape(32, 8, 64, 16),
    "mistral-7b": AttentionShape(32, 8, 128, 32, window=4096),
    "qwen2-7b": AttentionShape(28, 4, 128, 28),
    "qwen2.5-14b": AttentionShape(40, 8, 128, 48),
    "qwen3-30b-a3b": AttentionShape(32, 4, 128, 48),
    "gemma2-2b": AttentionShape(8, 4, 256, 26, window=4096, soft_cap=50.0),
    "gemma3-1b": AttentionShape(4, 1, 256, 26, window=512),
    "phi2": AttentionShape(32, 32, 80, 32),
    "deepseek-v2-lite": AttentionShape(16, 1, 576, 27, rank=512),
    "deepseek-v3": AttentionShape(128, 1, 576, 61, rank=512),
    "kimi-k2": AttentionShape(64, 1, 576, 61, rank=512),
}
