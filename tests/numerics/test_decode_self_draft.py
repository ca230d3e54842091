"""A target that drafts for itself: what each way of passing through a part of it computes, and what it leaves alone."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM

import decode.native_library
from decode.cache import BufferLayer, KVCache
from decode.llama import leave_to_transformers
from decode.model import CachedModel
from decode.native_library import BYTE_PRODUCTS, native_library
from decode.native_sampling import native_available
from decode.params import SamplingParams, SpeculationParams
from decode.plain import PlainDecoder
from decode.self_draft import SelfDraft, new_adapter
from decode.self_proposer import SelfDraftProposer, self_draft_proposer
from decode.shadow import places_of
from decode.speculative import SpeculativeEngine

Build = Callable[..., LlamaForCausalLM]
SHAPE: dict[str, Any] = dict(num_layers=4, hidden_size=64, intermediate_size=128, head_dim=32, vocab_size=150)
TEXTS = [[5, 9, 30, 31, 32, 7], [5, 9, 77]]  # ragged
DRAFTED = torch.tensor([[11, 12, 13], [99, 98, 97]])
SPECS = {
    "attention": SelfDraft(skipped_attention=(1, 3)),
    "mlp": SelfDraft(skipped_mlp=(0, 2)),
    "both": SelfDraft(skipped_attention=(1, 2), skipped_mlp=(2, 3)),
    "exit": SelfDraft(num_layers=2),
    "8 bits": SelfDraft(bits=8),
    "4 bits, skipping": SelfDraft(bits=4, skipped_attention=(1,), skipped_mlp=(2,)),
    "exit, mlp": SelfDraft(num_layers=2, adapter="mlp"),
    "exit, layer": SelfDraft(num_layers=1, adapter="layer"),
    "exit, skipping": SelfDraft(num_layers=3, skipped_attention=(0,), skipped_mlp=(1,)),
}


class Recorder:
    """A sampler that says what it is told and keeps the logits it is given."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.speculation = SimpleNamespace(entropy_bound=None)
        self.needs_q = False

    def can_draft_at_once(self, logits: Tensor) -> bool:
        return False

    def draft(self, logits: Tensor, drafted: Tensor, *of_vocabulary: object) -> tuple[Tensor, None]:
        self.logits.append(logits.float())
        return DRAFTED[:, drafted.shape[1]], None


def adapter_for(model: LlamaForCausalLM, spec: SelfDraft) -> dict[str, Tensor]:
    return {} if spec.adapter is None else new_adapter(model, spec.adapter)


def one_round(model: LlamaForCausalLM, spec: SelfDraft, draft_vocab: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits of drafting, [rows, drafted, columns], and of the target after it, [rows, drafted + 1, vocab]."""
    target, recorder = CachedModel(model, 2, 20, 3), Recorder()
    target.read(TEXTS)
    proposer = self_draft_proposer(model, spec, draft_vocab, adapter_for(model, spec))
    proposer.start(TEXTS, target)
    proposal = proposer.propose(TEXTS, [3, 3], recorder)  # type: ignore[arg-type]
    assert target.lengths == [len(text) - 1 for text in TEXTS]
    tokens = torch.cat([torch.tensor([[text[-1]] for text in TEXTS]), proposal.tokens], dim=1)
    scores = (proposal.score or target.forward)(tokens)
    assert target.lengths == [len(text) + 3 for text in TEXTS]
    return torch.stack(recorder.logits, dim=1), scores.float()


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).square().mean().sqrt())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@torch.inference_mode()
def test_every_way_computes_the_same(spec: SelfDraft, tiny_llama: Build) -> None:
    """transformers' own pass, ours in torch, and in C++, the last two of which are chosen by themselves."""
    model = tiny_llama(seed=1, **SHAPE)
    of_transformers = copy.deepcopy(model)
    leave_to_transformers(of_transformers)
    drafted, scores = one_round(of_transformers, spec)
    # what is left out, or rounded away, is missed
    assert error(drafted, scores[:, :-1]) > (0.005 if spec.bits == 8 else 0.05) * float(scores.std())
    for found, truth in zip(one_round(model, spec), (drafted, scores), strict=True):
        assert error(found, truth) < 1e-5 * float(truth.std())
    rounded = copy.deepcopy(model).bfloat16()
    theirs = copy.deepcopy(rounded)
    leave_to_transformers(theirs)
    for found, other, truth in zip(one_round(rounded, spec), one_round(theirs, spec), (drafted, scores), strict=True):
        # rounded elsewhere; a mistake would be of the size of the logits themselves
        if spec.bits:  # weights that lie between two integers may have gone to the other one
            assert error(found, other) < 0.07 * float(truth.std())
        else:
            assert error(found, truth) < min(1.5 * error(other, truth), 0.1 * float(truth.std()))
    if native_available():
        assert CachedModel(rounded, 1, 8).fast.native is not None  # type: ignore[union-attr]


@pytest.mark.skipif(not native_available(), reason="needs a compiler and AVX-512")
@pytest.mark.parametrize("name", ["8 bits", "4 bits, skipping"])
@torch.inference_mode()
def test_products_of_bytes_are_those_of_wider_numbers(
    name: str, tiny_llama: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without matrix units, which may have instructions for bytes (VNNI) or not: bit for bit."""
    model, has, found = tiny_llama(seed=1, **SHAPE).bfloat16(), torch.cpu.get_capabilities(), []
    commands: list[list[str]] = []
    kept = decode.native_library._kept
    monkeypatch.setattr(decode.native_library, "_kept", lambda command: commands.append(command) or kept(command))
    try:
        for has_them in (bool(has.get("avx512_vnni")), False):
            of_processor = has | {"amx_tile": False, "avx512_vnni": has_them}
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda of_processor=of_processor: of_processor)
            native_library.cache_clear()
            found.append(one_round(copy.deepcopy(model), SPECS[name])[0])
    finally:
        native_library.cache_clear()
    assert [BYTE_PRODUCTS in command for command in commands] == [bool(has.get("avx512_vnni")), False]
    assert torch.equal(*found)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_it_decodes_in_bfloat16_too(spec: SelfDraft, tiny_llama: Build) -> None:
    """Which C++ does where it can, with a draft that was made before inference began."""
    model = tiny_llama(seed=1, **SHAPE).bfloat16()
    proposer = self_draft_proposer(model, spec, torch.arange(0, 150, 2), adapter_for(model, spec))
    engine = SpeculativeEngine(model, proposer, SpeculationParams(num_draft_tokens=2, never_slower=False))
    completions, traces = engine.generate_ids(TEXTS, SamplingParams(max_new_tokens=12, temperature=1.0))
    assert [len(completion.ids) for completion in completions] == [12, 12]
    assert sum(trace.num_drafted for trace in traces) > 10
    assert proposer.fast is not None or not native_available()


@torch.inference_mode()
def test_the_target_says_what_it_says_alone(tiny_llama: Build) -> None:
    """After drafting, in the cache that was drafted in."""
    # torch's products round one token and several differently, by CPU; a mistake would be of the size of the logits, 2
    of_bf16 = 0.01 if native_available() else 0.1
    for model in (tiny_llama(seed=1, **SHAPE), tiny_llama(seed=1, **SHAPE).bfloat16()):
        alone = CachedModel(model, 2, 20, 3)
        alone.read(TEXTS)
        truth = alone.forward(torch.cat([torch.tensor([[text[-1]] for text in TEXTS]), DRAFTED], dim=1)).float()
        for spec in SPECS.values():
            assert error(one_round(model, spec)[1], truth) < (1e-5 if model.dtype == torch.float32 else of_bf16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_reduced_vocabulary_has_columns_of_the_whole_one(dtype: torch.dtype, tiny_llama: Build) -> None:
    model, ids = tiny_llama(seed=1, **SHAPE).to(dtype), torch.tensor([0, 3, 30, 149])
    for spec in SPECS.values():
        whole, reduced = one_round(model, spec)[0], one_round(model, spec, ids)[0]
        torch.testing.assert_close(whole[..., ids], reduced, atol=1e-5, rtol=1e-5)
    assert model.get_output_embeddings().out_features == 150


@torch.inference_mode()
def test_first_layers_pass_over_each_token_once(tiny_llama: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(seed=1, **SHAPE)
    leave_to_transformers(model)
    counts: dict[int, int] = {}
    update = BufferLayer.update

    def counted(layer: Any, keys: Tensor, *others: Any, **more: Any) -> Any:
        index = layer.owner.layers.index(layer)
        counts[index] = counts.get(index, 0) + keys.shape[2]
        return update(layer, keys, *others, **more)

    monkeypatch.setattr(BufferLayer, "update", counted)
    one_round(model, SelfDraft(num_layers=2))
    read = max(map(len, TEXTS)) - 1
    assert counts == dict.fromkeys(range(4), read + 4)  # the last committed token and three drafted
    counts.clear()
    one_round(model, SelfDraft(skipped_mlp=(1,)))
    assert counts == dict.fromkeys(range(4), read + 3 + 4)


def test_there_is_no_second_cache(tiny_llama: Build) -> None:
    model = tiny_llama(seed=1, **SHAPE)
    for spec in SPECS.values():
        proposer = self_draft_proposer(model, spec, tensors=adapter_for(model, spec))
        engine = SpeculativeEngine(model, proposer, SpeculationParams(num_draft_tokens=2, never_slower=False))
        engine.generate_ids(TEXTS, SamplingParams(max_new_tokens=8))
        target = engine.proposing_for
        assert target is not None
        assert proposer.cached.cache is target.cache


def cache_bytes(model: LlamaForCausalLM, prompts: list[list[int]], spec: SelfDraft | None) -> int:
    """Of all keys and values that were held at once, drafting so or (None) plainly."""
    params, caches = SamplingParams(max_new_tokens=128), []
    with pytest.MonkeyPatch.context() as patched:

        class Watched(KVCache):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                caches.append(self)

        patched.setattr("decode.model.KVCache", Watched)
        if spec is None:
            PlainDecoder(model, frozenset()).generate_ids(prompts, params)
        else:
            proposer = self_draft_proposer(model, spec, tensors=adapter_for(model, spec))
            SpeculativeEngine(model, proposer, SpeculationParams(never_slower=False)).generate_ids(prompts, params)
    layers: list[Any] = [layer for cache in caches for layer in cache.layers if layer.is_initialized]
    return sum(buffer.untyped_storage().nbytes() for layer in layers for buffer in (layer.keys, layer.values))


@pytest.mark.parametrize("name", ["both", "exit", "8 bits"])
def test_keys_and_values_take_what_they_take_in_plain_decoding(name: str, tiny_llama: Build) -> None:
    spec = SPECS[name]
    model = tiny_llama(seed=1, **SHAPE)
    alone, ragged = [[5, 9, 30] * 7], [[5, 9, 30] * 14, [5, 9, 77], [7] * 20]
    assert cache_bytes(model, alone, spec) == cache_bytes(model, alone, None)
    assert cache_bytes(model, ragged, spec) <= 1.05 * cache_bytes(model, ragged, None)


@pytest.mark.parametrize(
    ("known", "lengths"), [([30, 30], [31, 32]), ([38, 12], [39, 30]), ([0, 39], [40, 40]), ([20, 39], [39, 40])]
)
def test_rows_far_behind_do_not_push_others_out_of_the_cache(
    known: list[int], lengths: list[int], tiny_llama: Build
) -> None:
    proposer = self_draft_proposer(tiny_llama(seed=1, **SHAPE), SelfDraft(num_layers=1))
    proposer.cached = CachedModel(tiny_llama(seed=1, **SHAPE), 2, 40, 3)
    found = proposer._with_room(known, lengths)
    width = max(length - start for length, start in zip(lengths, found, strict=True))
    assert max(found) + width <= 43
    assert all(0 <= mine <= theirs for mine, theirs in zip(found, known, strict=True))
    assert found == known or max(known) + max(a - b for a, b in zip(lengths, known, strict=True)) > 43


def test_layers_that_are_not_there(tiny_llama: Build) -> None:
    model = tiny_llama(seed=1, **SHAPE)
    for spec, said in (
        (SelfDraft(skipped_attention=(4,)), "skipped_attention: there is no layer 4; the target has 0 to 3"),
        (SelfDraft(skipped_mlp=(-1,)), "skipped_mlp: there is no layer -1; the target has 0 to 3"),
        (SelfDraft(num_layers=4), "num_layers: 4 is not possible; give 1 to 3 for this target"),
        (SelfDraft(num_layers=0), "num_layers: 0 is not possible; give 1 to 3 for this target"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            self_draft_proposer(model, spec)


def test_an_architecture_whose_layers_are_elsewhere_is_refused_by_name() -> None:
    config = OPTConfig(vocab_size=20, hidden_size=16, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(ValueError, match=r"^target: model type 'opt' has no list of 2 layers .*; it cannot draft for"):
        places_of(OPTForCausalLM(config))


def test_the_target_stays_as_it_is(tiny_llama: Build) -> None:
    model = tiny_llama(seed=1, **SHAPE)
    modules, weights = dict(model.named_modules()), {name: id(weight) for name, weight in model.named_parameters()}
    expected = PlainDecoder(model, frozenset()).generate_ids(TEXTS, SamplingParams(max_new_tokens=8))
    proposer: SelfDraftProposer = self_draft_proposer(model, SPECS["exit, skipping"], torch.tensor([1, 2, 3]))
    assert {id(weight) for weight in proposer.model.parameters()} - set(weights.values()) != set()  # its head
    assert dict(model.named_modules()) == modules
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    again = PlainDecoder(model, frozenset()).generate_ids(TEXTS, SamplingParams(max_new_tokens=8))
    assert [each.ids for each in again] == [each.ids for each in expected]
