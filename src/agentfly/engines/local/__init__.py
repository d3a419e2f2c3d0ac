"""The local engine: continuous batching with PyTorch and transformers, in this process. Importing it imports torch.

    request -> inbox -> admission -> prefill -> decode batch -> sampler -> reply
    engine     engine   scheduler    prefill    decode_batch    sampler    engine

    engine            the thread, the inbox, delivery, publish and hold
    scheduler         the queue and the state of a sequence; slot_scheduler and paged_scheduler run the steps
    slot_allocator    slot_attention     the slot cache: grows with its use; the default without a GPU
    page_allocator    paged_attention    the paged cache: one pool, shared prefixes, CUDA graphs; the default on a GPU
    prefill           decode_batch       cuda_graphs       the two kinds of forward passes over pages, and their graphs
    replica           the module tree that is run: the model's own weights with the attention of a cache and fused kernels
    load              model names -> models

`publish` means that the weights have changed in place. The step that runs at that moment is discarded, both caches are
emptied, and every running sequence is prefilled again from its tokens. Tokens sampled before keep their version.
"""

from .engine import LocalEngine
from .load import load_model

__all__ = ["LocalEngine", "load_model"]
