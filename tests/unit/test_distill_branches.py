"""Branches off a text are read and drafted as if each stood alone behind it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distill.branches import (
    Branches,
    choose_starts,
    draft_branches,
    predicting,
    refuse_unbranchable,
    with_branches,
)
from distill.teacher import Batch, collate, hidden_states

VOCAB = 24
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SHAPE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.3,
}
QWEN3_SHAPE = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**QWEN3_SHAPE)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
    "gpt2, learnt positions": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SHAPE, bos_token_id=1, eos_token_id=2)),
}
LENGTHS, RESPONSES = (9, 5, 12), (4, 3, 7)
NUM_BRANCHES, NUM_DRAFTED = 4, 3


def build(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().float().eval().requires_grad_(False)


@pytest.fixture(scope="module", params=["llama", *MODELS])
def model(request: pytest.FixtureRequest, tiny_llama: Callable[..., LlamaForCausalLM]) -> PreTrainedModel:
    return tiny_llama(vocab_size=VOCAB) if request.param == "llama" else build(request.param)


def texts() -> Batch:
    """Of different lengths, padded to the right."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length, response in zip(LENGTHS, RESPONSES, strict=True):
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "response_mask": [False] * (length - response) + [True] * response})
    return collate(rows, padding_id=0)


def some_branches(batch: Batch) -> Branches:
    """Some of them begin at the same place, and some at a text's last response token but one."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.tensor([[4, 4, 5, 7], [1, 2, 3, 3], [4, 8, 10, 10]])
    assert batch["predicts"].gather(1, starts).all()
    return Branches(starts, torch.randint(3, VOCAB, (*starts.shape, NUM_DRAFTED), generator=generator))


@torch.no_grad()
def alone(model: PreTrainedModel, batch: Batch, branches: Branches) -> Tensor:
    """What predicts each branch's tokens and the one after: hidden states of a pass over it and what precedes it."""
    rows = []
    for ids, starts, tokens in zip(batch["input_ids"], branches.starts.tolist(), branches.tokens, strict=True):
        for start, branch in zip(starts, tokens, strict=True):
            sequence = torch.cat([ids[: start + 1], branch]).unsqueeze(0)
            rows.append(model.get_decoder()(input_ids=sequence, use_cache=False).last_hidden_state[0, start:])
    return torch.stack(rows).unflatten(0, branches.starts.shape)


@torch.no_grad()
def together(model: PreTrainedModel, batch: Batch, branches: Branches, **changes: Tensor) -> tuple[Tensor, Tensor]:
    """The same from one pass, and the hidden states of the texts."""
    length = batch["input_ids"].shape[1]
    hidden = hidden_states(model, with_branches(batch, branches) | changes)
    places = predicting(length, branches).flatten(1).unsqueeze(2).expand(-1, -1, hidden.shape[-1])
    found = hidden.gather(1, places).view(*branches.starts.shape, branches.tokens.shape[2] + 1, -1)
    return found, hidden[:, :length]


# --- reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafted", [0, 1, NUM_DRAFTED])
def test_each_branch_is_read_as_if_alone(model: PreTrainedModel, num_drafted: int) -> None:
    batch = texts()
    branches = some_branches(batch)
    branches = branches._replace(tokens=branches.tokens[..., :num_drafted])
    found, _ = together(model, batch, branches)
    expected = alone(model, batch, branches)
    assert found.shape == (len(LENGTHS), NUM_BRANCHES, num_drafted + 1, 32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    head = model.get_output_embeddings()
    torch.testing.assert_close(head(found), head(expected), rtol=1e-4, atol=1e-4)
    assert (expected - expected.roll(1, 1)).abs().max() > 0.1  # the control: they differ


def test_the_texts_do_not_see_their_branches(model: PreTrainedModel) -> None:
    batch = texts()
    with torch.no_grad():
        expected = hidden_states(model, batch)
    _, found = together(model, batch, some_branches(batch))
    there = torch.arange(batch["input_ids"].shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    torch.testing.assert_close(found[there], expected[there], rtol=1e-4, atol=1e-5)
    assert found.isfinite().all()  # in the padding too, or gradients would not be


def test_a_mask_that_shows_more_and_places_elsewhere_are_told() -> None:
    """The controls of the equality above."""
    model, batch = build("qwen3"), texts()
    branches = some_branches(batch)
    expected = alone(model, batch, branches)
    right = with_branches(batch, branches)
    mask, length = right["attention_mask"], batch["input_ids"].shape[1]
    size = mask.shape[-1]
    in_order = torch.ones(size, size, dtype=torch.bool).tril()
    other_branches, more_text, later_tokens = mask.clone(), mask.clone(), mask.clone()
    other_branches[..., length:, length:] = in_order[length:, length:]
    more_text[..., length:, :length] = True
    later_tokens[..., length:, length:] |= mask[..., length:, length:].mT
    for wrong in (other_branches, more_text, later_tokens, in_order.expand_as(mask)):
        found, _ = together(model, batch, branches, attention_mask=wrong)
        assert (found - expected).abs().max() > 0.1
    in_line = torch.arange(size).expand(len(LENGTHS), -1)
    found, _ = together(model, batch, branches, position_ids=in_line)
    assert (found - expected).abs().max() > 0.1
    found, _ = together(model, batch, branches)
    assert (found - expected).abs().max() < 1e-4


def test_what_each_position_sees() -> None:
    batch = {"input_ids": torch.tensor([[11, 12, 13, 14], [21, 22, 23, 0]])}
    branches = Branches(torch.tensor([[1, 2], [0, 0]]), torch.tensor([[[31, 32], [33, 34]], [[41, 42], [43, 44]]]))
    sequences = with_branches(batch, branches)
    assert sequences["input_ids"].tolist() == [[11, 12, 13, 14, 31, 32, 33, 34], [21, 22, 23, 0, 41, 42, 43, 44]]
    assert sequences["position_ids"].tolist() == [[0, 1, 2, 3, 2, 3, 3, 4], [0, 1, 2, 3, 1, 2, 1, 2]]
    assert sequences["attention_mask"].shape == (2, 1, 8, 8)
    assert sequences["attention_mask"].dtype == torch.bool
    seen = [["".join(str(int(s)) for s in row) for row in mask[0]] for mask in sequences["attention_mask"]]
    text = ["10000000", "11000000", "11100000"]
    assert seen[0] == [*text, "11110000", "11001000", "11001100", "11100010", "11100011"]
    assert seen[1] == [*text, "11110000", "10001000", "10001100", "10000010", "10000011"]
    assert predicting(4, branches).tolist() == [[[1, 4, 5], [2, 6, 7]], [[0, 4, 5], [0, 6, 7]]]


def test_nothing_drafted_is_the_text_alone() -> None:
    batch = texts()
    starts = some_branches(batch).starts
    branches = Branches(starts, torch.zeros(*starts.shape, 0, dtype=torch.long))
    sequences, length = with_branches(batch, branches), batch["input_ids"].shape[1]
    assert torch.equal(sequences["input_ids"], batch["input_ids"])
    assert sequences["attention_mask"].shape == (len(LENGTHS), 1, length, length)
    assert torch.equal(predicting(length, branches), starts.unsqueeze(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_read_branches_otherwise_are_refused(dtype: torch.dtype) -> None:
    for name in MODELS:
        for attention in ("sdpa", "eager"):
            model = build(name).to(dtype)
            model.set_attn_implementation(attention)
            refuse_unbranchable(model, "draft")
    window = MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=4)).to(dtype).eval()
    with pytest.raises(ValueError, match=r"^branches\.share: the draft, of model type .* use 0$"):
        refuse_unbranchable(window, "draft")


# --- starting ---------------------------------------------------------------------------------------------


def test_branches_start_evenly_where_a_response_goes_on() -> None:
    predicts, num_draws = texts()["predicts"], 6000
    torch.manual_seed(0)
    starts = choose_starts(predicts, num_draws)
    assert (starts.shape, starts.dtype) == ((len(LENGTHS), num_draws), torch.int64)
    assert (starts.diff(dim=1) >= 0).all()
    for row, chosen in zip(predicts, starts, strict=True):
        counts = torch.bincount(chosen, minlength=len(row))
        assert not counts[~row].any()
        even = num_draws / int(row.sum())
        assert (counts[row] - even).abs().max() < 4 * math.sqrt(even)


def test_a_response_of_one_token_bears_all_branches() -> None:
    predicts = torch.zeros(2, 6, dtype=torch.bool)
    predicts[0, 3] = predicts[1, 0] = True
    assert choose_starts(predicts, 5).tolist() == [[3] * 5, [0] * 5]


# --- drafting ---------------------------------------------------------------------------------------------

FEW = 6  # tokens, so that all pairs of them can be counted


def excess_chi_square(outcomes: Tensor, probabilities: Tensor) -> float:
    """In standard deviations above what draws from these probabilities give."""
    expected = probabilities.double() * len(outcomes)
    counts = torch.bincount(outcomes, minlength=len(probabilities)).double()
    degrees = len(expected) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@torch.no_grad()
def test_branches_are_drawn_from_the_draft(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Pairs of tokens, off two places of a text, against the draft's distribution of all pairs."""
    draft = tiny_llama(vocab_size=FEW, initializer_range=0.1)
    ids, places, num_rows, each = [1, 4, 3, 5, 2, 4], (1, 4), 100, 60
    batch = collate([{"input_ids": ids, "response_mask": [False] + [True] * 5}] * num_rows, padding_id=0)
    starts = torch.tensor(places).repeat_interleave(each).expand(num_rows, -1)
    asked: list[int] = []

    def sample(hidden: Tensor) -> Tensor:
        asked.append(len(hidden))
        return draft.lm_head(hidden).softmax(-1).multinomial(1).squeeze(1)

    torch.manual_seed(0)
    branches = draft_branches(batch, starts, 2, lambda texts: hidden_states(draft, texts), sample)
    assert torch.equal(branches.starts, starts)
    assert branches.tokens.shape == (num_rows, 2 * each, 2)
    assert asked == [num_rows * 2 * each] * 2  # the places where a token follows, and no others
    pairs = branches.tokens[..., 0] * FEW + branches.tokens[..., 1]
    exact = []
    for place in places:
        first = draft(input_ids=torch.tensor([ids[: place + 1]])).logits[0, -1].softmax(-1)
        longer = torch.tensor([[*ids[: place + 1], token] for token in range(FEW)])
        exact.append((first.unsqueeze(1) * draft(input_ids=longer).logits[:, -1].softmax(-1)).flatten())
    for index in (0, 1):
        drawn = pairs[:, index * each : (index + 1) * each].flatten()
        assert exact[index].min() * len(drawn) > 4  # enough of each pair for the statistic
        assert excess_chi_square(drawn, exact[index]) < 4
        assert excess_chi_square(drawn, exact[1 - index]) > 40  # the control: the other place


def test_drafting_leaves_no_graph_and_draws_as_often_as_asked(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    draft, batch = tiny_llama(vocab_size=VOCAB), texts()
    starts = some_branches(batch).starts
    widths: list[int] = []

    def passes(sequences: Batch) -> Tensor:
        widths.append(sequences["input_ids"].shape[1])
        hidden = hidden_states(draft, sequences)
        assert not hidden.requires_grad
        return hidden

    branches = draft_branches(batch, starts, 3, passes, lambda hidden: torch.full((len(hidden),), 7))
    length = batch["input_ids"].shape[1]
    assert widths == [length, length + NUM_BRANCHES, length + 2 * NUM_BRANCHES]
    assert branches.tokens.tolist() == [[[7] * 3] * NUM_BRANCHES] * len(LENGTHS)
    assert draft_branches(batch, starts, 0, passes, lambda hidden: hidden).tokens.shape == (*starts.shape, 0)
