"""Log-probs in chunks equal the naive computation, in values and gradients, and never hold all logits."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from agentfly.learn.batching import Rows
from agentfly.learn.model.logprobs import Scorer
from agentfly.types import Sample
from tests.close import assert_close_to_norm
from tests.learn.chains import tiny_llama

SMALL = {"vocab_size": 50, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "initializer_range": 0.3}
PAIRS = {"num_key_value_heads": 2, "head_dim": 8}


def family(name):
    """One tiny random model of each kind of head."""
    torch.manual_seed(1)
    if name == "llama":
        return tiny_llama(50)
    kind = {"qwen2": "Qwen2", "gemma2": "Gemma2", "granite": "Granite", "cohere": "Cohere", "phi": "Phi"}.get(name)
    extra = {
        "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
        "gemma2": {**PAIRS, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "sliding_window": 4},
        "granite": {"num_key_value_heads": 2, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
        "cohere": {"num_key_value_heads": 2, "logit_scale": 0.25},
        "phi": {},
    }
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=0)
        return transformers.GPT2LMHeadModel(config).eval()
    config = getattr(transformers, f"{kind}Config")(**SMALL, **WIDE, **extra[name])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    if name == "phi":  # its head has a bias, which starts at zero and would hide a mistake
        torch.nn.init.normal_(model.lm_head.bias)
    return model


FAMILIES = ["llama", "qwen2", "gemma2", "granite", "cohere", "phi", "gpt2"]


class OwnHead(torch.nn.Module):
    """A model with an extra step after its head: only its full forward gives its logits."""

    def __init__(self):
        super().__init__()
        self.inner = family("llama")
        self.base_model = self.inner.model
        self.config = self.inner.config

    def get_output_embeddings(self):
        return self.inner.lm_head

    def forward(self, input_ids, **options):
        output = self.inner(input_ids, **options)
        output.logits = output.logits * 2 + 1
        return output


def rows_of(seed=0, vocabulary=50, prefix=6):
    """Four rows of mixed length and mask that begin alike."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    start = torch.randint(0, vocabulary, (prefix,), generator=generator).tolist()
    for length in (9, 14, 14, 20):
        ids = start + torch.randint(0, vocabulary, (length - prefix,), generator=generator).tolist()
        mask = [0] * (prefix + 1) + [int(i % 3 != 0) for i in range(length - prefix - 1)]
        zeros = [0.0] * length
        samples.append(Sample(ids, mask, zeros, [0] * length, zeros, zeros))
    return samples


def naive(model, samples, temperature):
    """Row by row, all logits at once."""
    logprobs, entropies = [], []
    for sample in samples:
        logits = model(torch.tensor(sample.token_ids)[None]).logits[0].float() / temperature
        logp = torch.log_softmax(logits, -1)
        for position in range(1, len(sample.mask)):
            if sample.mask[position]:
                logprobs.append(logp[position - 1, sample.token_ids[position]])
                entropies.append(-(logp[position - 1].exp() * logp[position - 1]).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_equal_the_naive_computation(name, chunk):
    model, samples = family(name), rows_of()
    rows = Rows(samples)
    batch = rows.tensors(range(4), torch.device("cpu"))
    scorer = Scorer(model, temperature=0.7, chunk=chunk)
    assert scorer.head is not None, "this family's head should have been recognised"
    scores = scorer(batch, entropy="gradient")
    expected, entropies = naive(model, samples, 0.7)
    assert_close_to_norm(scores.logprobs, expected)
    assert_close_to_norm(scores.entropies, entropies)
    weights = torch.linspace(-1, 1, len(expected))
    got = gradients(model, (scores.logprobs * weights).sum() + scores.entropies.sum())
    wanted = gradients(model, (expected * weights).sum() + entropies.sum())
    assert_close_to_norm(got, wanted)


def test_rows_that_begin_alike_are_run_from_their_common_prefix():
    model = family("llama")
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda _m, args, _o: seen.append(tuple(args[0].shape)))
    scorer = Scorer(model)
    assert scorer.head.backbone.shares
    seen.clear()
    scorer(Rows(rows_of()).tensors(range(4), torch.device("cpu")))
    assert seen == [(1, 6), (4, 13)], "6 shared ids once, then what follows them"


def test_a_sliding_window_is_run_plainly():
    scorer = Scorer(family("gemma2"))
    assert scorer.head is not None
    assert not scorer.head.backbone.shares


@pytest.mark.parametrize("entropy", ["none", "gradient"])
def test_an_unknown_step_after_the_head_falls_back_to_the_model_s_own_forward(entropy):
    model, samples = OwnHead(), rows_of()
    scorer = Scorer(model)
    assert scorer.head is None
    scores = scorer(Rows(samples).tensors(range(4), torch.device("cpu")), entropy=entropy, keep_hidden=True)
    expected, _ = naive(model, samples, 1.0)
    assert_close_to_norm(scores.logprobs, expected)
    assert scores.hidden.shape == (len(expected), 32)


def test_entropy_is_outside_the_graph_unless_asked_for():
    batch = Rows(rows_of()).tensors(range(4), torch.device("cpu"))
    scorer = Scorer(family("llama"))
    assert scorer(batch).entropies is None
    assert not scorer(batch, entropy="value").entropies.requires_grad
    assert scorer(batch, entropy="gradient").entropies.requires_grad


class Largest(TorchDispatchMode):
    """Sees every operation, backward included, and remembers the largest tensor that came out of one."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_a_vocabulary_of_150_thousand_never_has_all_its_logits_in_memory():
    vocabulary, chunk = 150_000, 8
    model = tiny_llama(vocabulary, width=8, layers=1)
    samples = rows_of(vocabulary=vocabulary)
    rows = Rows(samples)
    batch = rows.tensors(range(4), torch.device("cpu"))
    scorer = Scorer(model, chunk=chunk)
    bound = chunk * vocabulary
    assert rows.num_tokens > 2 * chunk
    with Largest() as chunked:
        scorer(batch, entropy="value").logprobs.sum().backward()
    assert chunked.numel <= bound
    with Largest() as whole:
        Scorer(model, chunk=rows.num_tokens)(batch).logprobs.sum().backward()
    assert whole.numel == rows.num_tokens * vocabulary, "and the measure would have seen it"
