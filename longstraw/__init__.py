"""longstraw: a torch.compile backend for GRPO steps with very long prompts.

step = torch.compile(step, backend="longstraw")
"""

from longstraw.arch.rules import Rule
from longstraw.arch.user_scan import Scan
from longstraw.errors import LongstrawError
from longstraw.explain import Explanation, explain
from longstraw.options import Drift, Options
from longstraw.parity import Parity, verify

__all__ = ["Drift", "Explanation", "LongstrawError", "Options", "Parity", "Rule", "Scan", "explain", "verify"]
