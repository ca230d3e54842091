"""SmolLM2 in fp32: greedy speculative decoding gives the tokens of plain decoding, batched and alone."""

from pathlib import Path

import pytest
import torch

from decode import SamplingParams, SpeculationParams, SpeculativeDecoder
from decode.heldout import heldout_prompts
from decode.pair import load_model, load_tokenizer
from decode.proposer import DraftModelProposer
from decode.speculative import SpeculativeEngine
from decode.trace import Trace
from distill.build import draft_from_layers

pytestmark = pytest.mark.real

NUM_PROMPTS = 40
PARAMS = SamplingParams(max_new_tokens=32)
THREE = SpeculationParams(num_draft_tokens=3, never_slower=False)


@pytest.fixture(scope="module")
def decoder(real_target: Path, tmp_path_factory: pytest.TempPathFactory) -> SpeculativeDecoder:
    """The target with a draft of four of its layers, untrained: it is hardly ever right."""
    folder = tmp_path_factory.mktemp("draft")
    draft = draft_from_layers(load_model(str(real_target), role="target"), [0, 1, 28, 29])
    draft.save_pretrained(folder)
    load_tokenizer(str(real_target)).save_pretrained(folder)
    return SpeculativeDecoder.from_pretrained(str(real_target), str(folder), THREE, dtype="float32")


@pytest.fixture(scope="module")
def prompts(decoder: SpeculativeDecoder) -> list[list[int]]:
    # every other one: the set is sorted by category
    return decoder.encode_all(heldout_prompts("service")[::2][:NUM_PROMPTS], PARAMS)


@pytest.fixture(scope="module")
def expected(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[list[int]]:
    return [completion.ids for completion in decoder.plain.generate_ids(prompts, PARAMS)]


def differences(found: list[list[int]], expected: list[list[int]]) -> list[tuple[int, list[int], list[int]]]:
    pairs = zip(found, expected, strict=True)
    return [(row, ids, reference) for row, (ids, reference) in enumerate(pairs) if ids != reference]


def test_a_poor_draft_changes_no_token(
    decoder: SpeculativeDecoder, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert len(prompts) == NUM_PROMPTS
    assert len({len(prompt) for prompt in prompts}) > 5  # ragged
    completions, traces = decoder.engine.generate_ids(prompts, PARAMS)
    assert differences([completion.ids for completion in completions], expected) == []
    total = sum(traces, Trace())
    assert total.betas[0] < 0.5
    assert total.num_verified - total.num_accepted > 500  # rejection was exercised


def test_a_prompt_alone_gets_the_same_tokens(
    decoder: SpeculativeDecoder, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    (completion,), _ = decoder.engine.generate_ids(prompts[5:6], PARAMS)
    (alone,) = decoder.plain.generate_ids(prompts[5:6], PARAMS)
    assert completion.ids == alone.ids == expected[5]


@pytest.mark.parametrize(("left_out", "low", "high"), [((), 0.98, 1), ((11, 17), 0.1, 0.95)], ids=["itself", "cut"])
def test_the_target_as_its_own_draft_whole_or_cut(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    expected: list[list[int]],
    left_out: tuple[int, ...],
    low: float,
    high: float,
) -> None:
    layers = [layer for layer in range(30) if layer not in left_out]
    draft = draft_from_layers(decoder.target, layers) if left_out else decoder.target
    proposer = DraftModelProposer(draft, decoder.target.get_output_embeddings().out_features)
    engine = SpeculativeEngine(decoder.target, proposer, THREE, decoder.engine.stop_ids)
    completions, traces = engine.generate_ids(prompts[:6], PARAMS)
    assert differences([completion.ids for completion in completions], expected[:6]) == []
    total = sum(traces, Trace())
    assert low <= total.num_accepted / total.num_verified <= high


def test_the_text_is_that_of_transformers(
    decoder: SpeculativeDecoder, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    ids = torch.tensor(prompts[:1])
    output = decoder.target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
    assert output[0, ids.shape[1] :].tolist() == expected[0]


DEMO_PAIR = Path(__file__).parents[2] / "runs" / "demo-service" / "run" / "pair"


@pytest.mark.skipif(not DEMO_PAIR.is_dir(), reason="the pair that scripts/demo trains is not there")
def test_the_demo_s_pair_changes_no_token() -> None:
    params = SamplingParams(max_new_tokens=128)
    decoder = SpeculativeDecoder.from_pretrained(None, str(DEMO_PAIR), THREE, dtype="float32")
    prompts = decoder.encode_all(heldout_prompts("service")[::2][:NUM_PROMPTS], params)
    reference = [completion.ids for completion in decoder.plain.generate_ids(prompts, params)]
    completions, traces = decoder.engine.generate_ids(prompts, params)
    assert differences([completion.ids for completion in completions], reference) == []
    assert sum(map(len, reference)) > 3000
    assert sum(traces, Trace()).betas[0] > 0.3  # acceptance was exercised
