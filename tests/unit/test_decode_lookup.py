"""What followed before is proposed again: the latest place of the longest match, and never the text's own end."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.lookup import MAX_NGRAM, MIN_NGRAM, CascadeProposer, LookupProposer, NgramIndex
from decode.proposer import Proposal
from decode.sampling import Distribution

VOCAB = 12


# --- the index --------------------------------------------------------------------------------------------


def test_the_latest_place_wins() -> None:
    index = NgramIndex([1, 2, 3, 1, 2, 4, 1, 2])
    assert index.continuation([1, 2], 3) == [4, 1, 2]
    index.extend([5])
    assert index.continuation([1, 2], 3) == [5]  # now something follows the last one


def test_the_longest_match_wins_over_a_later_one() -> None:
    index = NgramIndex([9, 8, 1, 2, 5, 7, 1, 2, 6, 9, 8, 1, 2])
    assert index.continuation([9, 8, 1, 2], 1) == [5]
    assert index.continuation([7, 8, 1, 2], 1) == [5]  # three of them
    assert index.continuation([7, 1, 2], 1) == [6]
    assert index.continuation([3, 3, 1, 2], 1) == [6]  # two


def test_fewer_than_two_tokens_are_no_match() -> None:
    index = NgramIndex([1, 2, 3, 4])
    assert (MIN_NGRAM, MAX_NGRAM) == (2, 4)
    assert index.continuation([2], 3) == index.continuation([], 3) == index.continuation([9, 2], 3) == []
    assert index.continuation([1, 2], 3) == [3, 4]


def test_the_end_of_the_text_is_never_its_own_match() -> None:
    index = NgramIndex([1, 2, 3])
    assert index.continuation([1, 2, 3], 5) == []
    assert NgramIndex([5]).continuation([5, 5], 2) == []
    # but what overlaps it is: a text that repeats goes on repeating
    assert NgramIndex([7, 7, 7]).continuation([7, 7, 7], 5) == [7]
    assert NgramIndex([7] * 6).continuation([7] * 6, 5) == [7]


@pytest.mark.parametrize(("most", "expected"), [(0, []), (1, [3]), (3, [3, 4, 5]), (99, [3, 4, 5, 6])])
def test_a_continuation_is_as_long_as_may_be(most: int, expected: list[int]) -> None:
    assert NgramIndex([1, 2, 3, 4, 5, 6]).continuation([1, 2], most) == expected


def searched(tokens: list[int], context: list[int], most: int) -> list[int]:
    """The same by looking everywhere."""
    for size in range(min(MAX_NGRAM, len(context)), MIN_NGRAM - 1, -1):
        wanted = context[len(context) - size :]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == wanted:
                return tokens[start + size : start + size + most]
    return []


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    other=st.lists(st.integers(0, 2), max_size=6),
    most=st.integers(0, 5),
)
def test_the_index_finds_what_a_search_finds(tokens: list[int], cuts: list[int], other: list[int], most: int) -> None:
    index = NgramIndex()
    for cut in sorted(cuts):
        index.extend(tokens[len(index.tokens) : cut])
    index.extend(tokens[len(index.tokens) :])
    for context in (tokens, other):
        assert index.continuation(context, most) == searched(tokens, context, most)


# --- the proposer -----------------------------------------------------------------------------------------

SAMPLER: Any = None  # lookup draws nothing
TARGET: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")), vocab_size=VOCAB)
REPEATS = [1, 2, 3, 4, 1, 2]  # goes on with 3, 4, 1, 2
NEW = [5, 6, 7]


def started(sequences: list[list[int]], reference: list[int] | None = None) -> LookupProposer:
    proposer = LookupProposer(reference or [])
    proposer.start(sequences, TARGET)
    return proposer


def drafted(proposal: Proposal) -> list[list[int]]:
    pairs = zip(proposal.tokens.tolist(), proposal.num_drafted.tolist(), strict=True)
    return [tokens[:count] for tokens, count in pairs]


def test_rows_draft_what_they_find_and_no_more_than_they_may() -> None:
    sequences = [REPEATS, NEW, [*REPEATS, 3]]
    proposal = started(sequences).propose(sequences, [3, 3, 1], SAMPLER)
    assert drafted(proposal) == [[3, 4, 1], [], [4]]
    assert proposal.tokens.shape == (3, 3)


def test_q_has_all_its_mass_on_what_is_proposed() -> None:
    sequences = [REPEATS, [*REPEATS, 3]]
    proposal = started(sequences).propose(sequences, [3, 2], SAMPLER)
    assert proposal.q is not None
    dense = proposal.q.dense(VOCAB)
    assert torch.equal(dense[0], torch.nn.functional.one_hot(proposal.tokens[0], VOCAB).float())
    assert dense[1, :2].argmax(-1).tolist() == drafted(proposal)[1]


def test_nothing_found_is_nothing_proposed() -> None:
    proposal = started([NEW, NEW]).propose([NEW, NEW], [4, 4], SAMPLER)
    assert proposal.tokens.shape == (2, 0)
    assert proposal.num_drafted.tolist() == [0, 0]


def test_a_reference_is_searched_where_the_row_has_no_match() -> None:
    reference = [6, 7, 8, 9, 10, 1, 2, 11]
    sequences = [NEW, REPEATS, [3, 3]]
    proposal = started(sequences, reference).propose(sequences, [2, 2, 2], SAMPLER)
    assert drafted(proposal) == [[8, 9], [3, 4], []]  # the row's own text comes first


def test_the_index_follows_its_row_from_round_to_round() -> None:
    row = list(NEW)
    proposer = started([row])
    assert drafted(proposer.propose([row], [4], SAMPLER)) == [[]]
    row.extend([9, 5, 6])
    assert drafted(proposer.propose([row], [4], SAMPLER)) == [[7, 9, 5, 6]]
    row.extend([8, 5, 6])  # the target chose otherwise: the latest place counts
    assert drafted(proposer.propose([row], [2], SAMPLER)) == [[8, 5]]


def test_rows_leave_and_take_their_index_with_them() -> None:
    rows = [list(NEW), list(REPEATS), [8, 9, 10, 8, 9]]
    proposer = started(rows)
    proposer.propose(rows, [1, 1, 1], SAMPLER)
    proposer.select_rows([2, 1])
    rows = [rows[2], rows[1]]
    assert drafted(proposer.propose(rows, [2, 2], SAMPLER)) == [[10, 8], [3, 4]]
    proposer.start([NEW], TARGET)  # a new batch has forgotten the old one
    assert drafted(proposer.propose([[1, 2]], [2], SAMPLER)) == [[]]


# --- the cascade ------------------------------------------------------------------------------------------


@dataclass
class CountingDraft:
    """Drafts `width` tokens a row, 10 each, from a flat q; counts how often it is asked."""

    width: int = 2
    needs_q: bool = True
    asked: list[list[int]] = field(default_factory=list)
    selected: list[list[int]] = field(default_factory=list)

    def start(self, sequences: list[list[int]], target: Any) -> None:
        self.num_rows = len(sequences)

    def propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: Any) -> Proposal:
        assert len(sequences) == self.num_rows
        self.asked.append(num_drafted)
        tokens = torch.full((len(sequences), self.width), 10)
        flat = Distribution(torch.full((*tokens.shape, VOCAB), 1 / VOCAB))
        allowed = torch.tensor([min(self.width, most) for most in num_drafted])
        return Proposal(tokens, allowed, flat if self.needs_q else None)

    def select_rows(self, rows: list[int]) -> None:
        self.selected.append(rows)
        self.num_rows = len(rows)


def cascade(sequences: list[list[int]], **draft: Any) -> tuple[CascadeProposer, CountingDraft]:
    counting = CountingDraft(**draft)
    proposer = CascadeProposer(LookupProposer(), counting)
    proposer.start(sequences, TARGET)
    return proposer, counting


def test_the_draft_is_asked_only_when_a_row_has_no_match() -> None:
    sequences = [REPEATS, [*REPEATS, 3]]
    proposer, draft = cascade(sequences)
    assert drafted(proposer.propose(sequences, [3, 2], SAMPLER)) == [[3, 4, 1], [4, 1]]
    assert draft.asked == []
    sequences[1] = [*sequences[1], 9, 9]
    assert drafted(proposer.propose(sequences, [3, 2], SAMPLER)) == [[3, 4, 1], [10, 10]]
    assert draft.asked == [[3, 2]]


def test_without_any_match_the_draft_s_proposal_is_passed_on() -> None:
    proposer, draft = cascade([NEW, NEW])
    proposal = proposer.propose([NEW, NEW], [3, 1], SAMPLER)
    assert drafted(proposal) == [[10, 10], [10]]
    assert proposal.q is not None
    assert proposal.q.token_ids is None
    assert draft.asked == [[3, 1]]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_each_row_keeps_its_own_q(width: int) -> None:
    """Whether lookup's continuation is the shorter or the longer one."""
    sequences = [REPEATS, NEW]
    proposer, _ = cascade(sequences, width=width)
    proposal = proposer.propose(sequences, [3, 4], SAMPLER)
    assert drafted(proposal) == [[3, 4, 1], [10] * width]
    assert proposal.q is not None
    q = proposal.q.dense(VOCAB)
    assert q.shape == (2, max(3, width), VOCAB)
    assert torch.equal(q[0, :3], torch.nn.functional.one_hot(torch.tensor([3, 4, 1]), VOCAB).float())
    torch.testing.assert_close(q[1, :width], torch.full((width, VOCAB), 1 / VOCAB))


def test_where_the_sampler_needs_no_q_there_is_none() -> None:
    proposer, _ = cascade([REPEATS, NEW], needs_q=False)
    proposal = proposer.propose([REPEATS, NEW], [3, 3], SAMPLER)
    assert proposal.q is None
    assert drafted(proposal) == [[3, 4, 1], [10, 10]]


def test_both_of_them_hear_which_rows_go_on() -> None:
    sequences = [NEW, REPEATS, NEW]
    proposer, draft = cascade(sequences)
    proposer.propose(sequences, [1, 1, 1], SAMPLER)
    proposer.select_rows([1, 2])
    assert draft.selected == [[1, 2]]
    assert drafted(proposer.propose([REPEATS, NEW], [2, 2], SAMPLER)) == [[3, 4], [10, 10]]
