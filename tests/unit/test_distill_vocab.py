"""The draft's output vocabulary: where the target's probability mass is, and what must be kept in any case."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.pair import load_model
from decode.params import SamplingParams
from distill import vocab as vocab_module
from distill.config import RespondConfig
from distill.responses import load_responses, respond
from distill.vocab import choose_vocab, probability_mass, smallest_vocab

MASS = torch.tensor([0.0, 0.1, 0.3, 0.05, 0.2, 0.15, 0.2])


def test_choose_vocab_takes_the_largest_masses_and_what_must_be_kept() -> None:
    chosen = choose_vocab(MASS, 4, {0})
    assert chosen.tolist() == [0, 2, 4, 6]
    assert chosen.dtype == torch.int64
    assert choose_vocab(MASS, 3, set()).tolist() == [2, 4, 6]
    assert choose_vocab(MASS, 2, {0, 3}).tolist() == [0, 3]
    assert choose_vocab(MASS, 100, {0}).tolist() == list(range(7))
    assert MASS[0] == 0
    with pytest.raises(ValueError, match="vocab_size: 1 has no room for the 2 special tokens"):
        choose_vocab(MASS, 1, {0, 3})


@pytest.mark.parametrize(
    ("coverage", "always", "expected"),
    [
        (0.29, set(), [2]),
        (0.49, set(), [2, 4]),
        (0.69, set(), [2, 4, 6]),
        # what must be kept counts
        (0.34, {3}, [2, 3]),
        (0.54, {3}, [2, 3, 4]),
        (0.01, {0, 3}, [0, 3]),
        # a token that is never said is no part of the whole
        (1.0, set(), [1, 2, 3, 4, 5, 6]),
        (1.0, {0}, list(range(7))),
    ],
)
def test_smallest_vocab_holds_its_share(coverage: float, always: set[int], expected: list[int]) -> None:
    chosen = smallest_vocab(MASS, coverage, always)
    assert chosen.tolist() == expected
    assert chosen.dtype == torch.int64


def test_no_smaller_vocab_holds_that_share() -> None:
    generator = torch.Generator().manual_seed(0)
    for coverage in (0.1, 0.5, 0.9, 0.99):
        mass = torch.rand(500, generator=generator).pow(6)
        mass /= mass.sum()
        chosen = smallest_vocab(mass, coverage, set())
        assert mass[chosen].sum() >= coverage
        assert mass[choose_vocab(mass, len(chosen) - 1, set())].sum() < coverage
        assert chosen.equal(choose_vocab(mass, len(chosen), set()))


@pytest.fixture(scope="module")
def target(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder(num_layers=2, hidden_size=16, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def responses(target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("responses")
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(12)))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=10, seed=0)
    prompts, output = str(folder / "prompts.txt"), str(folder / "responses")
    return str(respond(RespondConfig(target=str(target), prompts=prompts, output=output, sampling=sampling)))


@torch.no_grad()
def true_p(model: PreTrainedModel, rows: list[dict[str, Any]]) -> Tensor:
    """The target's distribution before each response token, float64 [tokens, vocab]."""
    parts = []
    for row in rows:
        start = row["response_mask"].index(True)
        parts.append(model(input_ids=torch.tensor([row["input_ids"][:-1]])).logits[0, start - 1 :])
    return torch.cat(parts).double().softmax(-1)


def test_probability_mass_is_the_mean_of_p_on_training_responses(target: Path, responses: str) -> None:
    before = sorted(path.name for path in Path(responses).rglob("*"))
    model = load_model(str(target))
    mass = probability_mass(responses, model)
    p = true_p(model, list(load_responses(responses, "train")))
    assert len(p) > 50
    torch.testing.assert_close(mass.double(), p.mean(0), rtol=1e-4, atol=1e-7)
    assert mass.sum() == pytest.approx(1, abs=1e-5)
    # the control: the held-out responses have another mean
    heldout = true_p(model, list(load_responses(responses, "heldout")))
    assert (heldout.mean(0) - p.mean(0)).abs().max() > 0.01
    # somebody else's folder is only read
    assert sorted(path.name for path in Path(responses).rglob("*")) == before


def test_probability_mass_stops_after_enough_tokens(
    target: Path, responses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_module, "VOCAB_SAMPLE_TOKENS", 1)
    model = load_model(str(target))
    mass = probability_mass(responses, model)
    means = [true_p(model, [row]).mean(0) for row in load_responses(responses, "train")]
    assert sum(torch.allclose(mass.double(), mean, rtol=1e-4, atol=1e-7) for mean in means) == 1
