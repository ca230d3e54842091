"""transformers is asked for the same text as our decoder, and drafts as it was told."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.generation.utils as generation
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from decode import SamplingParams, SpeculativeDecoder
from decode.baselines import NUMS_ASSISTANT_TOKENS, NUMS_EXIT_TOKENS, Assistance, TransformersBaselines
from decode.progress import ProgressBar
from decode.proposer import DraftModelProposer

PROMPT = [1, 40, 50, 60]
GREEDY = SamplingParams(max_new_tokens=24)

Build = Callable[..., tuple[SpeculativeDecoder, TransformersBaselines]]


@pytest.fixture
def build(
    tiny_llama: Callable[..., LlamaForCausalLM], byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Build:
    """A decoder and its baselines; the keyword arguments go into the generation configs of the two models."""

    def built(
        target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, draft_vocab_size: int = 259
    ) -> tuple[SpeculativeDecoder, TransformersBaselines]:
        target_model, draft_model = tiny_llama(seed=0), tiny_llama(seed=1, num_layers=1, vocab_size=draft_vocab_size)
        for name, value in (target or {}).items():
            setattr(target_model.generation_config, name, value)
        for name, value in (draft or {}).items():
            setattr(draft_model.generation_config, name, value)
        draft_model.save_pretrained(tmp_path / "draft")
        decoder = SpeculativeDecoder(target_model, byte_tokenizer, DraftModelProposer(draft_model, 259))
        return decoder, TransformersBaselines(decoder, str(tmp_path / "draft"), "float32")

    return built


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every candidate generator was set to, and the most tokens that it drafted in a round."""
    seen: list[dict[str, Any]] = []

    class Watched(AssistedCandidateGenerator):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.seen = {
                "tokens": self.num_assistant_tokens,
                "threshold": self.generation_config.assistant_confidence_threshold,
                "schedule": self.assistant_generation_config.num_assistant_tokens_schedule,
                "drafted": 0,
            }
            seen.append(self.seen)

        def get_candidates(self, input_ids: torch.Tensor, **keywords: Any) -> Any:
            candidates, logits = super().get_candidates(input_ids, **keywords)
            self.seen["drafted"] = max(self.seen["drafted"], candidates.shape[1] - input_ids.shape[1])
            return candidates, logits

    monkeypatch.setattr(generation, "AssistedCandidateGenerator", Watched)
    return seen


def ours(decoder: SpeculativeDecoder, params: SamplingParams) -> list[int]:
    (completion,) = decoder.plain.generate_ids([PROMPT], params)
    return completion.ids


def test_greedy_text_is_ours_in_every_mode(build: Build) -> None:
    decoder, baselines = build()
    text = ours(decoder, GREEDY)
    assert len(text) > 8
    assert baselines.plain(PROMPT, GREEDY) == text
    assert baselines.assisted(PROMPT, GREEDY) == text
    for number in NUMS_ASSISTANT_TOKENS:
        assert baselines.assisted(PROMPT, GREEDY, Assistance(number)) == text


def test_tokens_are_told_of_as_they_come(build: Build) -> None:
    _, baselines = build()
    told: list[int] = []
    text = baselines.plain(PROMPT, GREEDY, on_tokens=told.append)
    assert told == [1] * len(text)  # nothing of the prompt
    # a draft that is the target is always right: with two drafted, three tokens come at once
    baselines.assistant = deepcopy(baselines.target)
    told.clear()
    assert baselines.assisted(PROMPT, GREEDY, Assistance(2), on_tokens=told.append) == text
    assert sum(told) == len(text)
    assert max(told) == 3


def test_it_stops_at_our_stop_tokens(build: Build) -> None:
    text = ours(build()[0], GREEDY)
    decoder, baselines = build(target={"eos_token_id": text[7]})
    end = text.index(text[7]) + 1
    assert baselines.plain(PROMPT, GREEDY) == baselines.assisted(PROMPT, GREEDY, Assistance(3)) == text[:end]
    decoder.engine.stop_ids = frozenset()
    assert (
        TransformersBaselines(decoder, str(baselines.assistant.name_or_path), "float32").plain(PROMPT, GREEDY) == text
    )


def test_what_the_models_configure_for_themselves_is_left_out(build: Build) -> None:
    _, bare = build()
    sampled = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=24)
    torch.manual_seed(0)
    wanted = [bare.plain(PROMPT, sampled), bare.assisted(PROMPT, sampled, Assistance(2)), bare.plain(PROMPT, GREEDY)]
    penalties = {"repetition_penalty": 9.0, "suppress_tokens": wanted[0], "min_p": 0.9, "top_k": 1, "do_sample": True}
    decoder, baselines = build(target=penalties, draft=penalties)
    own = decoder.target.generation_config
    torch.manual_seed(0)
    assert [
        baselines.plain(PROMPT, sampled),
        baselines.assisted(PROMPT, sampled, Assistance(2)),
        baselines.plain(PROMPT, GREEDY),
    ] == wanted
    assert decoder.target.generation_config is own
    assert own.repetition_penalty == 9.0


def test_sampling_parameters_arrive(build: Build) -> None:
    decoder, baselines = build()
    with torch.inference_mode():
        order = decoder.target(input_ids=torch.tensor([PROMPT])).logits[0, -1].argsort(descending=True).tolist()

    def ranks(**sampling: Any) -> set[int]:
        params = [SamplingParams(max_new_tokens=2, seed=seed, **sampling) for seed in range(8)]
        return {order.index(mode(PROMPT, each)[0]) for each in params for mode in (baselines.plain, baselines.assisted)}

    assert ranks(temperature=1e-3) == {0}
    assert ranks(temperature=1.0, top_p=1e-6) == {0}
    assert ranks(temperature=1.0, top_k=1) == {0}
    # nearly all 259 tokens are as probable; transformers left to itself would take the 50 first only
    assert max(ranks(temperature=50.0)) > 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_is_what_was_asked_for(build: Build, drafting: list[dict[str, Any]], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=40)
    _, baselines = build()
    for number in (1, 4):
        baselines.assisted(PROMPT, params, Assistance(number))
        assert drafting.pop() == {"tokens": number, "threshold": 0.0, "schedule": "constant", "drafted": number}
    baselines.assisted(PROMPT, params)
    default = drafting.pop()
    assert (default["tokens"], default["threshold"]) == (20, 0.4)


def test_by_default_the_drafts_own_settings_hold(build: Build, drafting: list[dict[str, Any]]) -> None:
    own = {"num_assistant_tokens": 7, "assistant_confidence_threshold": 0.1}
    _, baselines = build(draft=own)
    baselines.assisted(PROMPT, GREEDY, Assistance(2))
    baselines.assisted(PROMPT, GREEDY)
    assert [(seen["tokens"], seen["threshold"]) for seen in drafting] == [(2, 0.0), (7, 0.1)]


def test_a_sweep_tries_every_number(build: Build, drafting: list[dict[str, Any]]) -> None:
    _, baselines = build()
    bar = ProgressBar("sweep", 2 * len(NUMS_ASSISTANT_TOKENS))
    sweep = baselines.sweep([PROMPT, PROMPT[:2]], GREEDY, bar)
    assert [each.num_tokens for each in sweep] == list(NUMS_ASSISTANT_TOKENS)
    assert min(sweep.values()) > 0
    assert [seen["tokens"] for seen in drafting] == 2 * list(NUMS_ASSISTANT_TOKENS)
    assert bar.done == bar.total


def test_a_target_that_drafts_for_itself_exits_early(build: Build) -> None:
    decoder, _ = build()
    baselines = TransformersBaselines(decoder, None, "float32")
    text, settings = ours(decoder, GREEDY), decoder.target.generation_config
    assert {each.exit_layer for each in baselines.assistances} == {1, 2}
    assert {each.num_tokens for each in baselines.assistances} == set(NUMS_EXIT_TOKENS)
    for each in (None, *baselines.assistances):
        assert baselines.assisted(PROMPT, GREEDY, each) == text
    assert decoder.target.generation_config is settings
    assert decoder.target.config.num_hidden_layers == 2
    assert str(baselines.assistances[0]) == "1 by 1 layers"


@torch.no_grad()
def test_tokens_that_a_draft_has_not_learnt_are_not_drafted(
    tiny_llama: Callable[..., LlamaForCausalLM], byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    draft = tiny_llama(seed=1, num_layers=1, tie_word_embeddings=True)
    draft.save_pretrained(tmp_path / "draft")
    tokens, kept = torch.tensor([PROMPT]), torch.arange(0, 259, 2)
    before = draft(input_ids=tokens).logits
    decoder = SpeculativeDecoder(tiny_llama(), byte_tokenizer, DraftModelProposer(draft, 259, kept))
    assistant = TransformersBaselines(decoder, str(tmp_path / "draft"), "float32").assistant
    after = assistant(input_ids=tokens).logits
    assert torch.equal(after[..., kept], before[..., kept])
    assert after.softmax(dim=-1)[..., 1::2].max() == 0 < before.softmax(dim=-1)[..., 1::2].min()


def test_a_vocabulary_padded_otherwise_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="padded to 272, for another than the target's of 259; leave transformers out"):
        build(draft_vocab_size=272)
