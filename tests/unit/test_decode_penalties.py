"""Every position of a block is penalised as transformers would with the tokens drafted before it in the text."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from decode.completion import Completion
from decode.params import SamplingParams
from decode.penalties import Penalties

CPU = torch.device("cpu")
VOCAB = 12  # few, so that tokens come again and again
STOP = 11
Words = list[tuple[int, ...]]
fixed_examples = settings(derandomize=True, deadline=None, max_examples=80, database=None)


def completion(
    prompt: list[int],
    ids: list[int] | None = None,
    bad_words: Words | None = None,
    model_stop_ids: tuple[int, ...] = (),
    **params: Any,
) -> Completion:
    row = Completion(prompt, SamplingParams(**params), frozenset(model_stop_ids))
    row.bad_words = bad_words or []
    ids = ids or []
    assert row.extend(ids, ["plain"] * len(ids)) == len(ids)
    return row


def by_transformers(row: Completion, drafted: list[int], logits: Tensor) -> Tensor:
    """Logits [vocab] after the drafted tokens; presence and frequency, which transformers lacks, token by token."""
    context = torch.tensor([row.sequence + drafted])
    params, scores = row.params, logits.float().unsqueeze(0)
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()})(
            context, scores
        )
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(context, scores)
    for token, count in Counter(row.ids + drafted).items():
        scores[0, token] = scores[0, token] - params.frequency_penalty * count - params.presence_penalty
    if row.bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in row.bad_words])(context, scores)
    if row.stop_ids:
        processor = MinNewTokensLengthLogitsProcessor(len(row.prompt), params.min_new_tokens, list(row.stop_ids))
        scores = processor(context, scores)
    return scores[0]


def expected_of(rows: list[Completion], drafted: Tensor, logits: Tensor) -> Tensor:
    num_positions = logits.shape[1]
    return torch.stack(
        [
            torch.stack(
                [
                    by_transformers(
                        row, tokens[: len(tokens) - num_positions + 1 + position], logits[i, position].clone()
                    )
                    for position in range(num_positions)
                ]
            )
            for i, (row, tokens) in enumerate(zip(rows, drafted.tolist(), strict=True))
        ]
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(rows: list[Completion], drafted: list[list[int]], num_positions: int | None = None) -> Tensor:
    tokens = torch.tensor(drafted, dtype=torch.long).reshape(len(rows), -1)
    logits = normal(len(rows), num_positions or tokens.shape[1] + 1, VOCAB)
    before = logits.clone()
    found = Penalties(rows, CPU)(logits, tokens)
    torch.testing.assert_close(found, expected_of(rows, tokens, logits), rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)
    return found


DRAFTED = [3, 3, 5, 1, 3]
ROWS = {
    "nothing": completion([1, 2, 3], [4]),
    "repetition": completion([1, 2, 2, 3], [4, 4], repetition_penalty=1.7),
    "repetition the other way": completion([1, 2], [4], repetition_penalty=0.6),
    "repetition of one token": completion([7], repetition_penalty=1.3),
    "presence": completion([1, 3], [4, 4, 4], presence_penalty=1.5),
    "frequency": completion([1, 3], [4, 3, 4], frequency_penalty=0.7),
    "negative presence and frequency": completion([1], [4, 5], presence_penalty=-1.0, frequency_penalty=-0.5),
    "all that count": completion(
        [5, 5, 1], [3, 0], repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=-0.2
    ),
    "bias": completion([1, 2], logit_bias={0: 1.5, 3: -2.0, 9: 100.0}),
    "bias that forbids": completion([1, 2], logit_bias={3: -float("inf"), 5: 2.0}),
    "forbidden and penalised": completion(
        [3, 2], logit_bias={3: -float("inf"), 5: 2.0}, repetition_penalty=1.5, frequency_penalty=1.0
    ),
    "one bad token": completion([1], bad_words=[(5,)]),
    "bad words": completion([1, 2, 3], [4], bad_words=[(3, 3), (4, 3, 3), (3, 5, 1), (5, 1), (8, 9), (6,)]),
    "bad words that end alike": completion([0, 5, 1], bad_words=[(3, 5), (5,), (5, 3, 5), (1, 5)]),
    "too short": completion([1, 2], [4], min_new_tokens=4, model_stop_ids=(STOP,)),
    "too short from the start": completion([1, 2], min_new_tokens=20, model_stop_ids=(STOP,)),
    "long enough": completion([1, 2], [4, 4, 4], min_new_tokens=3, model_stop_ids=(STOP,)),
    "too short with two stops": completion([1], [4], min_new_tokens=3, stop_token_ids=(2, 6), model_stop_ids=(STOP,)),
    "nowhere to stop": completion([1], min_new_tokens=3),
    "everything": completion(
        [1, 2, 3, 3],
        [3, 1],
        bad_words=[(1, 3), (3, 5), (0,)],
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 1.0, 1: -0.5, STOP: 50.0},
        min_new_tokens=4,
        stop_token_ids=(7,),
        model_stop_ids=(STOP,),
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("num_drafted", [0, 1, 5])
def test_a_row_alone(name: str, num_drafted: int) -> None:
    check([ROWS[name]], [DRAFTED[:num_drafted]])


@pytest.mark.parametrize(
    "name", ["repetition", "presence", "frequency", "all that count", "bad words", "too short", "everything"]
)
def test_the_draft_counts(name: str) -> None:
    """The control: what the text alone gives is not what later positions of a block need."""
    logits = normal(1, 6, VOCAB)
    found = Penalties([ROWS[name]], CPU)(logits, torch.tensor([DRAFTED]))
    of_text = torch.stack([by_transformers(ROWS[name], [], logits[0, position].clone()) for position in range(6)])
    torch.testing.assert_close(found[0, 0], of_text[0])
    assert not torch.allclose(found[0], of_text)


@pytest.mark.parametrize("num_positions", [1, 2, 4, 6])
def test_all_rows_in_one_batch(num_positions: int) -> None:
    drafts = [[(3 * row + step * step) % 10 for step in range(5)] for row in range(len(ROWS))]
    found = check(list(ROWS.values()), drafts, num_positions)
    logits = normal(len(ROWS), num_positions, VOCAB)
    row = list(ROWS).index("nothing")
    assert torch.equal(found[row].view(torch.int32), logits[row].view(torch.int32))  # bit for bit


def test_nothing_asked_for_changes_nothing() -> None:
    logits = normal(2, 3, VOCAB)
    found = Penalties([completion([1, 2], [3]), completion([4])], CPU)(logits, torch.tensor([[1, 2], [4, 4]]))
    assert torch.equal(found.view(torch.int32), logits.view(torch.int32))
    assert found.data_ptr() != logits.data_ptr()


@fixed_examples
@given(st.integers(0, 2**31))
def test_any_rows_in_any_company(seed: int) -> None:
    chance = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [chance.randrange(VOCAB - 1) for _ in range(chance.randint(least, most))]

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if chance.random() < 0.5 else otherwise

    rows = [
        completion(
            tokens(1, 6),
            tokens(0, 6),
            bad_words=maybe([tuple(tokens(1, 4)) for _ in range(chance.randint(1, 4))], []),
            model_stop_ids=maybe((STOP,), ()),
            repetition_penalty=maybe(chance.uniform(0.5, 2), 1.0),
            presence_penalty=maybe(chance.uniform(-2, 2), 0.0),
            frequency_penalty=maybe(chance.uniform(-2, 2), 0.0),
            logit_bias=maybe({token: chance.choice([-float("inf"), -1.0, 2.5]) for token in tokens(1, 4)}, {}),
            min_new_tokens=maybe(chance.randint(0, 9), 0),
        )
        for _ in range(chance.randint(1, 4))
    ]
    width = chance.randint(0, 5)
    check(rows, [tokens(width, width) for _ in rows], chance.randint(1, width + 1))


# ---- what each of them means, in numbers ----


def penalised(row: Completion, drafted: list[int], logits: list[float]) -> list[list[float]]:
    found = Penalties([row], CPU)(torch.tensor(logits).expand(1, len(drafted) + 1, -1), torch.tensor([drafted]).long())
    return [[round(each, 4) for each in position] for position in found[0].tolist()]


def test_the_prompt_is_repeated_but_not_present() -> None:
    row = completion([0, 1], [2], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert penalised(row, [2, 0], [1.0, -1.0, 4.0, 3.0]) == [
        [0.5, -2.0, 2.0 - 0.75, 3.0],
        [0.5, -2.0, 2.0 - 1.0, 3.0],
        [0.5 - 0.75, -2.0, 2.0 - 1.0, 3.0],
    ]


def test_a_token_drafted_twice_is_penalised_once_as_repeated_and_twice_as_frequent() -> None:
    row = completion([0], repetition_penalty=2.0, frequency_penalty=0.5)
    assert penalised(row, [1, 1], [1.0, 4.0]) == [[0.5, 4.0], [0.5, 1.5], [0.5, 1.0]]


def test_a_bad_word_across_text_and_draft() -> None:
    row, forbidden = completion([0, 1], [2], bad_words=[(1, 2, 3, 4)]), -float("inf")
    flat = [0.0] * 6
    ended = [0.0, 0.0, 0.0, 0.0, forbidden, 0.0]
    assert penalised(row, [3, 4], flat) == [flat, ended, flat]
    assert penalised(row, [0, 3], flat) == [flat, flat, flat]
    assert penalised(completion([1, 2, 3], bad_words=[(1, 2, 3, 4)]), [3], flat) == [ended, flat]
    # a text shorter than what must stand before the end
    assert penalised(completion([3], bad_words=[(1, 2, 3, 4)]), [3], flat) == [flat, flat]
    assert penalised(completion([0], bad_words=[(0, 0, 4)]), [5], flat) == [flat, flat]
    # all of it drafted
    assert penalised(completion([0], bad_words=[(1, 2, 3, 4)]), [1, 2, 3], flat) == [flat, flat, flat, ended]


def test_stops_are_forbidden_until_min_new_tokens_are_there() -> None:
    row, forbidden = completion([0], [1], min_new_tokens=3, model_stop_ids=(2,)), -float("inf")
    assert penalised(row, [1, 1], [0.0] * 3) == [[0, 0, forbidden], [0, 0, forbidden], [0, 0, 0]]


def test_bad_words_are_tokens_alone_and_after_a_space(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    def ids(text: str) -> list[int]:
        return list(byte_tokenizer.encode(text, add_special_tokens=False))

    params = SamplingParams(bad_words=("no",))
    row = Completion(ids("I say"), params, tokenizer=byte_tokenizer)
    logits = torch.zeros(1, 4, len(byte_tokenizer))
    found = Penalties([row], CPU)(logits, torch.tensor([ids(" no")]))
    last = ids("o")[0]
    assert found[0, :, last].tolist() == [0, 0, -float("inf"), 0]  # after "n", with or without the space
    assert found.isinf().sum() == 1


# ---- logits of other kinds ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_penalised_in_fp32(dtype: torch.dtype) -> None:
    rows = [ROWS["everything"], ROWS["nothing"]]
    drafted = torch.tensor([DRAFTED, DRAFTED])
    logits = normal(2, 6, VOCAB).to(dtype)
    before = logits.clone()
    found = Penalties(rows, CPU)(logits, drafted)
    assert found.dtype == torch.float32
    assert torch.equal(found, Penalties(rows, CPU)(logits.float(), drafted))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_positions", [1, 3, 6])
@pytest.mark.parametrize(
    "token_ids", [list(range(VOCAB)), [5, 3, 1, 11, 0], [9], [4, 2, 6]], ids=["all", "some", "one", "others"]
)
def test_a_reduced_vocabulary_gets_its_columns_of_the_whole(token_ids: list[int], num_positions: int) -> None:
    rows = list(ROWS.values())
    drafted = torch.tensor([[(3 * row + step * step) % 10 for step in range(5)] for row in range(len(rows))])
    logits = normal(len(rows), num_positions, VOCAB)
    columns = torch.full((VOCAB,), len(token_ids))
    columns[token_ids] = torch.arange(len(token_ids))
    reduced = logits[..., token_ids].contiguous()
    before = reduced.clone()
    found = Penalties(rows, CPU)(reduced, drafted, columns)
    assert torch.equal(found, Penalties(rows, CPU)(logits, drafted)[..., token_ids])
    assert torch.equal(reduced, before)


def test_what_was_committed_is_counted_anew_for_every_round() -> None:
    row = completion([1], [2], frequency_penalty=1.0)
    penalties = Penalties([row], CPU)
    logits = torch.zeros(1, 1, 4)
    assert penalties(logits, torch.tensor([[3]])).tolist() == [[[0, 0, -1, -1]]]
    assert penalties(logits, torch.tensor([[3, 3]])).tolist() == [
        [[0, 0, -1, -2]]
    ]  # a draft goes on, the text does not
    row.extend([3], ["plain"])
    assert penalties(logits, torch.zeros(1, 0, dtype=torch.long)).tolist() == [[[0, 0, -1, 0]]]
    assert Penalties([row], CPU)(logits, torch.zeros(1, 0, dtype=torch.long)).tolist() == [[[0, 0, -1, -1]]]
