"""A sound pair is proven; one with a planted fault is not, and the check that fails names it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import decode.verify
from decode import cli
from decode.config import ProveConfig
from decode.pair import Pair
from decode.params import SamplingParams
from decode.proposer import DraftModelProposer, Proposal
from decode.prove import HONEST, Check, _places, _uniform_p_values, prove
from decode.sampler import BatchSampler
from decode.sampling import Distribution

Build = Callable[..., LlamaForCausalLM]


@pytest.fixture
def pair(
    tiny_model_folder: Callable[..., Path],
    tiny_llama: Build,
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> Path:
    """A target of few likely tokens, and a draft that is the target with some noise on its weights."""
    target, draft = tiny_model_folder(seed=0), tiny_llama(seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    draft.save_pretrained(tmp_path / "pair" / "draft")
    byte_tokenizer.save_pretrained(tmp_path / "pair" / "draft")
    Pair(target={"id": str(target)}, num_draft_tokens=3).save(tmp_path / "pair")
    return tmp_path / "pair"


@pytest.fixture
def configure(pair: Path, tmp_path: Path) -> Callable[..., ProveConfig]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Item {number}\n" for number in range(24)))

    def made(**changes: Any) -> ProveConfig:
        defaults: dict[str, Any] = dict(num_prompts=24, max_new_tokens=40)
        defaults["sampling"] = SamplingParams(temperature=0.8, top_p=0.9)
        return ProveConfig(pair=str(pair), prompts=str(prompts), **defaults | changes)

    return made


def by_name(checks: list[Check]) -> dict[str, bool]:
    return {check.name: check.passed for check in checks}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_sound_pair_is_proven(dtype: str, configure: Callable[..., ProveConfig], pair: Path) -> None:
    checks = prove(configure(dtype=dtype))
    assert all(check.passed for check in checks), checks
    wanted = ["greedy, float32", "greedy, bfloat16", "sampled distribution", "acceptance"]
    assert [check.name for check in checks] == [name for name in wanted if dtype != "auto" or name != wanted[1]]
    proof = json.loads((pair / "proof.json").read_text())
    assert proof["passed"]
    assert [check["name"] for check in proof["checks"]] == [check.name for check in checks]
    assert proof["checks"][-1]["figures"]["judged"] > 300
    assert proof["provenance"]["resolved_config"]["num_prompts"] == 24


def test_a_draft_that_has_not_read_its_last_token(
    configure: Callable[..., ProveConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(self: DraftModelProposer, sequences: list[list[int]]) -> list[int]:
        if all(self.cached.lengths):  # as if the last token that it drafted, and was accepted, had been fed to it
            self.cached.cache.lengths = [len(ids) - 1 for ids in sequences]
        return self.cached.lengths

    monkeypatch.setattr(DraftModelProposer, "_num_known", stale)
    checks = prove(configure())
    assert by_name(checks) == {"greedy, float32": True, "sampled distribution": True, "acceptance": False}
    assert "it is not that of the text so far" in checks[-1].found


def test_a_q_that_is_not_what_was_drawn_from(
    configure: Callable[..., ProveConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = DraftModelProposer.propose

    def flatter(self: DraftModelProposer, *arguments: Any) -> Proposal:
        proposal = propose(self, *arguments)
        if not isinstance(proposal.q, Distribution):
            return proposal
        weights = proposal.q.probabilities**0.3
        return replace(proposal, q=Distribution(weights / weights.sum(-1, keepdim=True), proposal.q.token_ids))

    monkeypatch.setattr(DraftModelProposer, "propose", flatter)
    found = by_name(prove(configure()))
    assert found["greedy, float32"]
    assert not found["sampled distribution"]
    assert not found["acceptance"]


def test_the_token_after_the_accepted_ones_from_one_place_before(
    configure: Callable[..., ProveConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def early(self: BatchSampler, p: Distribution, drafted: Tensor, num_drafted: Tensor, keys: Any) -> Any:
        tokens = self._draw(p, keys)
        num_accepted = decode.verify.verify_equal(tokens, drafted, num_drafted)
        return num_accepted, tokens.gather(1, (num_accepted - 1).clamp_min(0).unsqueeze(1)).squeeze(1)

    monkeypatch.setattr(BatchSampler, "_judge_equal", early)
    (greedy, *_) = prove(configure())
    assert not greedy.passed
    assert "texts are not those of plain decoding: prompt 0, token" in greedy.found
    at = Distribution.at
    monkeypatch.setattr(Distribution, "at", lambda self, places: at(self, (places - 1).clamp_min(0)))
    assert not by_name(prove(configure()))["sampled distribution"]


def test_top_p_on_one_side_only(configure: Callable[..., ProveConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    warper = BatchSampler._warper

    def without(self: BatchSampler, params: list[SamplingParams], temperature: Any = None, exact: bool = True) -> Any:
        if exact and self.speculation.num_draft_tokens:  # of the target, where it verifies
            params = [replace(each, top_p=1.0) for each in params]
        return warper(self, params, temperature, exact)

    monkeypatch.setattr(BatchSampler, "_warper", without)
    checks = {check.name: check for check in prove(configure())}
    assert not checks["sampled distribution"].passed
    assert "such as the target never says" in checks["sampled distribution"].found


def test_a_tokenizer_that_differs_in_one_id(
    configure: Callable[..., ProveConfig], pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pair / "draft" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    config = configure()
    assert cli.main(["prove", "--pair", config.pair, "--prompts", config.prompts]) == 2
    assert "its tokenizer is not that of target" in capsys.readouterr().err
    assert not (pair / "proof.json").exists()


def test_the_exit_code_tells(
    configure: Callable[..., ProveConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure()
    line = ["prove", "--pair", config.pair, "--prompts", config.prompts, "--num-prompts", "8"]
    assert cli.main([*line, "--max-new-tokens", "16"]) == 0
    assert capsys.readouterr().out.count("passed") == 3
    monkeypatch.setattr("decode.prove._uniform_p_values", lambda values: [HONEST / 2, 0.5])
    assert cli.main([*line, "--max-new-tokens", "16"]) == 1
    assert "plain decoding itself does not follow" in " ".join(capsys.readouterr().out.split())


def test_places_of_what_is_drawn_from_p_are_uniform_and_of_others_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(4000, 30, generator=generator)).softmax(-1)
    q = (2 * torch.randn(4000, 30, generator=generator)).softmax(-1)
    honest = p.multinomial(1, generator=generator).squeeze(1)
    biased = torch.where(torch.rand(4000, generator=generator) < 0.1, q.multinomial(1).squeeze(1), honest)

    def p_values(tokens: Tensor) -> list[float]:
        return _uniform_p_values(torch.stack([_places(p, order, tokens, generator) for order in (p, q / p)]))

    assert min(p_values(honest)) > 0.01
    assert min(p_values(biased)) < HONEST
    assert min(p_values((p * p).multinomial(1, generator=generator).squeeze(1))) < HONEST
    # equal probabilities are told apart by chance alone
    flat = torch.full((4000, 5), 0.2)
    assert min(_uniform_p_values(_places(flat, flat, torch.zeros(4000, dtype=torch.long), generator)[None])) > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_prompts=0), "num_prompts: 0 is"),
        (dict(max_new_tokens=1), "max_new_tokens: 1 leaves"),
        (dict(tie_steps=-1.0), "tie_steps: -1.0 is"),
        (dict(sampling=SamplingParams()), "sampling.temperature: 0 samples nothing"),
        (dict(sampling=SamplingParams(temperature=1, presence_penalty=1)), "sampling: p and q are compared without"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProveConfig(pair="pair", **changes)
