"""longstraw: a torch.compile backend for GRPO steps with very long prompts."""

from longstraw.options import Options

__all__ = ["Options"]
