"""Rows of a batch: each is decoded as if it were alone, wherever it stands, whoever its neighbours are.

In fp32 and at fixed numbers of drafted tokens; seeded and greedy rows also at those that the clock suggests.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from decode.lookup import CascadeProposer, LookupProposer
from decode.params import SamplingParams, SpeculationParams
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer, Proposer
from decode.speculative import SpeculativeEngine

Build = Callable[..., LlamaForCausalLM]
VOCAB, CONTEXT = 40, 48
# one of a single token, one that repeats itself, lengths that differ
PROMPTS = [[1, 30, 31, 32, 33, 34, 35, 36, 37], [5], [7, 7, 20, 7, 7, 20, 7], [3, 9]]
STOP_IDS = frozenset({11, 12})
ROWS = [
    SamplingParams(temperature=1.0, max_new_tokens=16, seed=1),
    SamplingParams(temperature=0.7, top_k=12, max_new_tokens=23, seed=2, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_new_tokens=9, presence_penalty=0.5, logit_bias={3: 1.0}),
    SamplingParams(temperature=1.2, top_p=0.9, min_p=0.02, max_new_tokens=19, seed=3, min_new_tokens=12),
]


def perturbed(model: Any, size: float) -> Any:
    """The model with noise on its weights, `size` of their spread."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight += size * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)
    return other


@pytest.fixture(scope="module")
def target(tiny_llama: Build) -> LlamaForCausalLM:
    return tiny_llama(seed=0, vocab_size=VOCAB, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    other: LlamaForCausalLM = perturbed(target, 0.1)
    return other


def proposers(draft: PreTrainedModel) -> dict[str, Proposer]:
    model = DraftModelProposer(draft, VOCAB)
    return {"draft": model, "lookup": LookupProposer(range(VOCAB)), "cascade": CascadeProposer(LookupProposer(), model)}


def engine(target: PreTrainedModel, proposer: Proposer, stop_ids: frozenset[int] = STOP_IDS, **speculation: Any) -> Any:
    defaults: dict[str, Any] = dict(num_draft_tokens=3, never_slower=False)
    return SpeculativeEngine(target, proposer, SpeculationParams(**defaults | speculation), stop_ids)


def texts(
    decoder: SpeculativeEngine | PlainDecoder,
    prompts: list[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **more: Any,
) -> list[list[int]]:
    if isinstance(decoder, SpeculativeEngine):
        return [completion.ids for completion in decoder.generate_ids(prompts, params, **more)[0]]
    return [completion.ids for completion in decoder.generate_ids(prompts, params, **more)]  # type: ignore[arg-type]


@pytest.mark.parametrize("verification", ["auto", "block", "tokenwise", "seeded"])
@pytest.mark.parametrize("proposer", ["draft", "lookup", "cascade"])
def test_a_row_does_not_depend_on_its_neighbours(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, proposer: str, verification: str
) -> None:
    decoder = engine(target, proposers(draft)[proposer], verification=verification)
    together = texts(decoder, PROMPTS, ROWS)
    assert len(set(map(len, together))) > 2  # they leave the batch at different times
    for prompt, params, ids in zip(PROMPTS, ROWS, together, strict=True):
        assert texts(decoder, [prompt], [params]) == [ids]
    chance = random.Random(0)
    for _ in range(4):  # other neighbours, in other places and numbers, that end elsewhere
        order = [chance.randrange(4) for _ in range(chance.randint(2, 6))]
        strangers = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 12))] for _ in range(3)]
        longer = [replace(ROWS[0], seed=90 + row, max_new_tokens=7 * row + 1) for row in range(3)]
        prompts, params = [PROMPTS[row] for row in order], [ROWS[row] for row in order]
        found = texts(decoder, [*strangers[:1], *prompts, *strangers[1:]], [longer[2], *params, *longer[:2]])
        assert found[1:-2] == [together[row] for row in order]
    # a row that asks for more tokens begins with the same ones, if no round was cut short by its end
    more = [replace(params, max_new_tokens=params.max_new_tokens + 8) for params in ROWS]
    kept = [ids[:-4] for ids in together]
    assert [ids[: len(part)] for ids, part in zip(texts(decoder, PROMPTS, more), kept, strict=True)] == kept


@pytest.mark.parametrize("speculation", [{}, dict(num_draft_tokens=None, never_slower=True)], ids=["fixed", "paced"])
@pytest.mark.parametrize("proposer", ["draft", "lookup", "cascade"])
def test_seeded_and_greedy_rows_are_those_of_plain_decoding(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, proposer: str, speculation: dict[str, Any]
) -> None:
    decoder, plain = engine(target, proposers(draft)[proposer], **speculation), PlainDecoder(target, STOP_IDS)
    expected = texts(plain, PROMPTS, ROWS)
    assert [texts(plain, [prompt], [params])[0] for prompt, params in zip(PROMPTS, ROWS, strict=True)] == expected
    for _ in range(3):
        assert texts(decoder, PROMPTS, ROWS) == expected
    for params in ROWS:  # one for all rows
        assert texts(decoder, PROMPTS, params) == texts(plain, PROMPTS, params)
        assert texts(decoder, PROMPTS, params, streams=[4, 9, 0, 2]) == texts(
            plain, PROMPTS, params, streams=[4, 9, 0, 2]
        )


@pytest.mark.parametrize("verification", ["auto", "block", "tokenwise", "seeded"])
def test_one_seed_for_all_rows(target: LlamaForCausalLM, draft: LlamaForCausalLM, verification: str) -> None:
    decoder = engine(target, proposers(draft)["draft"], frozenset(), verification=verification)
    params = replace(ROWS[0], max_new_tokens=8)
    found = texts(decoder, PROMPTS[:1] * 6, params)
    assert len(set(map(tuple, found))) == 6
    assert texts(decoder, PROMPTS[:1] * 6, params) == found
    assert texts(decoder, PROMPTS[:1] * 6, replace(params, seed=2)) != found
    # each row's text is that of its stream; alone, it has the first
    assert texts(decoder, PROMPTS[:1], params) == found[:1]
    assert texts(decoder, PROMPTS[:1] * 3, params, streams=[5, 0, 3]) == [found[5], found[0], found[3]]
    # params of their own with the same seed: the same text
    assert texts(decoder, PROMPTS[:1] * 3, [params] * 3) == [found[0]] * 3


@pytest.mark.parametrize("in_a_list", [False, True])
def test_without_a_seed_torchs_generator_decides(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, in_a_list: bool
) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=8)
    asked: Any = [params] * 4 if in_a_list else params
    decoders = [PlainDecoder(target, frozenset())]
    decoders += [
        engine(target, proposers(draft)["draft"], frozenset(), verification=rule)
        for rule in ("auto", "tokenwise", "seeded")
    ]
    for decoder in decoders:
        torch.manual_seed(0)
        first, second = texts(decoder, PROMPTS[:1] * 4, asked), texts(decoder, PROMPTS[:1] * 4, asked)
        assert first != second
        assert len(set(map(tuple, first + second))) == 8
        torch.manual_seed(0)
        assert texts(decoder, PROMPTS[:1] * 4, asked) == first
        torch.manual_seed(1)
        assert texts(decoder, PROMPTS[:1] * 4, asked) != first


def gpt2(**config: Any) -> GPT2LMHeadModel:
    """With learned positions, of which there are no more than the context has."""
    defaults: dict[str, Any] = dict(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.3, bos_token_id=1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**defaults | config, eos_token_id=2)).eval()


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("proposer", ["draft", "lookup", "cascade"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_texts_that_fill_the_context(target: LlamaForCausalLM, kind: str, proposer: str, num_draft_tokens: int) -> None:
    """Rows one token before the end of the context stand next to others that go on drafting."""
    model: Any = target if kind == "llama" else gpt2()
    full = [[3 * place % VOCAB for place in range(CONTEXT - 4)], [4, 5] * ((CONTEXT - 1) // 2), [1, 9, 3], [8]]
    params = [
        SamplingParams(
            temperature=float(row % 2),
            seed=row,
            max_new_tokens=CONTEXT - len(prompt) if row != 2 else 30,
        )
        for row, prompt in enumerate(full)
    ]
    plain = PlainDecoder(model, frozenset())
    expected = [texts(plain, [prompt], [each])[0] for prompt, each in zip(full, params, strict=True)]
    assert [len(ids) for ids in expected] == [each.max_new_tokens for each in params]
    assert texts(plain, full, params) == expected
    decoder = engine(model, proposers(perturbed(model, 0.05))[proposer], frozenset(), num_draft_tokens=num_draft_tokens)
    assert texts(decoder, full, params) == expected
    assert texts(decoder, full[:1], params[:1]) == expected[:1]
    with pytest.raises(ValueError, match=f"longer than the context of {CONTEXT}"):
        texts(decoder, full, [*params[:3], replace(params[3], max_new_tokens=CONTEXT)])


@pytest.mark.parametrize("verification", ["auto", "block"])
@pytest.mark.parametrize("proposer", ["draft", "lookup", "cascade"])
def test_rows_of_one_token_next_to_longer_ones(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, proposer: str, verification: str
) -> None:
    decoder = engine(target, proposers(draft)[proposer], frozenset(), verification=verification)
    params = [replace(each, max_new_tokens=1, min_new_tokens=0) for each in ROWS]
    ones = texts(decoder, PROMPTS, params)
    assert list(map(len, ones)) == [1] * 4
    assert texts(decoder, PROMPTS, [params[0], ROWS[1], params[2], ROWS[3]])[::2] == ones[::2]
    _, traces = decoder.generate_ids(PROMPTS, [params[0], ROWS[1], params[2], ROWS[3]])
    for one in traces[::2]:
        assert (one.num_target_passes, one.num_drafted, one.num_committed) == (1, 0, 1)


@pytest.mark.parametrize("case", ["draft", "cascade", "paced"])
def test_the_draft_reads_what_was_committed(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are those of the text, also after rounds in which others drafted or nobody did."""
    chance, num_checked = random.Random(1), 0
    proposer = DraftModelProposer(draft, VOCAB)
    catch_up = proposer._catch_up

    def checked(sequences: list[list[int]]) -> Tensor:
        nonlocal num_checked
        logits = catch_up(sequences)
        for ids, row in zip(sequences, logits, strict=True):
            expected = proposer.score(torch.tensor([ids]))[0, -1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
            num_checked += 1
        return logits

    monkeypatch.setattr(proposer, "_catch_up", checked)
    lookup = LookupProposer([chance.randrange(VOCAB) for _ in range(400)])
    decoder = engine(target, CascadeProposer(lookup, proposer) if case == "cascade" else proposer)
    if case == "paced":
        monkeypatch.setattr(decoder.pacer, "num_draft_tokens", lambda _, most: min(chance.choice([0, 0, 2, 3]), most))
    params = [replace(each, max_new_tokens=36, min_new_tokens=36) for each in ROWS]
    for start in range(3):
        more = [replace(each, seed=start) if each.temperature else each for each in params]
        assert texts(decoder, PROMPTS, more) == texts(PlainDecoder(target, STOP_IDS), PROMPTS, more)
    assert num_checked > 40
