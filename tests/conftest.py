"""What all tests share: seeded tiny models, a byte-level tokenizer, and the one real target."""

import os

# Read when torch loads. Waiting threads that spin make two processes on two cores thirty times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test needs the hub; one that asks for it fails at once instead of after many retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from jaxtyping import install_import_hook

# Before these modules are first imported: their functions then check every shape they declare.
install_import_hook(["decode.sampling", "decode.verify", "distill.losses"], "beartype.beartype")

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ALL_THREADS = torch.get_num_threads()
REAL_TARGET = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")  # ids 0 to 2
# the target that tests of distillation distil
DISTILLED: dict[str, Any] = {"num_layers": 3, "hidden_size": 16, "tie_word_embeddings": True}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    """A second thread costs tiny models more than it gives."""
    torch.set_num_threads(ALL_THREADS if request.node.get_closest_marker("real") else 1)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """SmolLM2's chat format without its default system message; every byte of UTF-8 is a token.

    259 ids: <|pad|>, <|im_start|>, <|im_end|> (which ends a text), then the bytes.
    """
    return _byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """Builds a Llama with random weights, fp32, in eval mode: the same for the same arguments.

    Its arguments are seed, num_layers, hidden_size, vocab_size, and whatever else LlamaConfig takes.
    """
    return _tiny_llama


@pytest.fixture(scope="session")
def tiny_model_folder(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Saves a tiny_llama, built with the arguments given, and the byte tokenizer; returns the folder.

    Folders are shared between the tests of a session: read them only.
    """

    @cache
    def save(**arguments: Any) -> Path:
        folder = tmp_path_factory.mktemp("tiny-llama")
        _tiny_llama(**arguments).save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def distill_folders(
    tiny_model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What distillation begins from: read only.

    A target, its responses to 40 prompts, the same with the teacher's signal ("hidden_states", and all 259 "top_k"),
    and two pairs of two layers: with all output tokens ("whole") and with 120 ("reduced").
    """
    from decode.params import SamplingParams
    from distill.build import build
    from distill.cache import cache
    from distill.config import BuildConfig, CacheConfig, RespondConfig
    from distill.responses import respond

    torch.set_num_threads(1)
    folder, target = tmp_path_factory.mktemp("distill"), tiny_model_folder(**DISTILLED)
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(40)))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24, seed=0)
    prompts, responses = str(folder / "prompts.txt"), str(folder / "responses")
    respond(RespondConfig(target=str(target), prompts=prompts, output=responses, sampling=sampling))
    for kind in ("hidden_states", "top_k"):
        cache(CacheConfig(responses=responses, output=str(folder / kind), kind=kind, top_k=259))
    for name, vocab_size in (("whole", None), ("reduced", 120)):
        build(
            BuildConfig(
                target=str(target),
                output=str(folder / name),
                layers=2,
                vocab_size=vocab_size,
                responses=responses if vocab_size else None,
            )
        )
    return {"target": target} | {
        name: folder / name for name in ("responses", "hidden_states", "top_k", "whole", "reduced")
    }


@pytest.fixture
def configure_run(distill_folders: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    """A RunConfig on the reduced pair, that neither measures speed nor proves parity unless told so.

    What TrainConfig knows goes there, the rest into RunConfig; the output is tmp_path / "run".
    """
    from distill.config import RunConfig
    from train.config import TrainConfig

    def configure(**changes: Any) -> RunConfig:
        train = {"output": str(tmp_path / "run"), "batch_size": 8, "log_every_steps": 5}
        train |= {key: changes.pop(key) for key in list(changes) if key in TrainConfig.__dataclass_fields__}
        values = {"pair": distill_folders["reduced"], "responses": distill_folders["responses"]}
        values |= {"measure_speed": False, "parity_prompts": 0, **changes}
        values = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
        return RunConfig(**values, train=TrainConfig(**train))

    return configure


@pytest.fixture(scope="session")
def real_target() -> Path:
    """The folder of SmolLM2-135M-Instruct, for tests marked `real`."""
    if not (REAL_TARGET / "model.safetensors").is_file():
        pytest.fail(f"{REAL_TARGET} is not there: run scripts/fetch_smollm2.py", pytrace=False)
    return REAL_TARGET


@pytest.fixture(autouse=True)
def _quiet_loggers() -> Iterator[None]:
    """A command that ran in this process logs to a stream that was the test's own, and lets more through."""
    yield
    for package in ("train", "distill", "decode"):
        logger = logging.getLogger(package)
        logger.handlers = []
        logger.setLevel(logging.NOTSET)


def _tiny_llama(
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 32,
    vocab_size: int = len(SPECIAL_TOKENS) + 256,
    **config: Any,
) -> LlamaForCausalLM:
    defaults: dict[str, Any] = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # logits of a few units: neither flat, nor so peaked that sampling is greedy decoding
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**defaults | config)).float().eval()


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    pad, start, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
