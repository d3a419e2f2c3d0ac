"""The local engine: PyTorch and transformers, in this process.

In: a transformers causal LM and its tokenizer (`load_model` finds them by name). Out: `LocalEngine`. Importing this package
imports torch.
"""

from .engine import LocalEngine
from .load import load_model

__all__ = ["LocalEngine", "load_model"]
