"""A pair on disk: a draft, and `pair.json`, which names its target and what was measured."""

import hashlib
import json
import logging
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as logging_of_transformers

from .files import write_json
from .params import DraftKind

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# what transformers raises for folders that are not whole: RuntimeError for shapes, TypeError for a strange config
NOT_LOADABLE = (OSError, ValueError, TypeError, RuntimeError, SafetensorError, StrictDataclassError)
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass
class Pair:
    """What `pair.json` says.

    Attributes:
        target: "id" (hub name or folder), "revision", and hashes of its "config" and "tokenizer".
        draft_kind: what drafts; only "model" has a folder `draft`.
        self_draft: what of the target drafts, as `decode.self_draft.SelfDraft` has it; empty for "model".
        num_draft_tokens: tokens to draft a round unless the caller says otherwise.
        sampling: the sampling parameters the draft was made for.
        measured: what `spec-decode evaluate` found: acceptance with interval, prompt set, hardware.
        provenance: the resolved config, command, versions and git sha behind the draft.
    """

    target: dict[str, str | None]
    draft_kind: DraftKind = "model"
    self_draft: dict[str, Any] = field(default_factory=dict)
    num_draft_tokens: int = 3
    sampling: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write `pair.json` in one step, so that a reader sees the old one or the new one."""
        write_json(folder / "pair.json", {"format_version": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> "Pair":
        """Read `folder/pair.json`.

        Raises:
            ValueError: there is none, or it is not one we understand.
        """
        path = folder / "pair.json"
        if not folder.is_dir():
            raise ValueError(f"pair {folder}: there is no such folder; give the one that `spec-distill` wrote")
        if not path.is_file():
            raise ValueError(
                f"pair {folder}: holds no pair.json; give the folder that `spec-distill` wrote, "
                "or, with a draft of another origin, its --target"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
            version = content.pop("format_version", None)
            if version != FORMAT_VERSION:
                raise ValueError(f"format_version is {version}, this release reads {FORMAT_VERSION}")
            pair = cls(**content)
            if not isinstance(pair.target, dict) or type(pair.num_draft_tokens) is not int or pair.num_draft_tokens < 1:
                raise ValueError("target must be an object and num_draft_tokens a whole number of at least 1")
            if not isinstance(pair.target.get("id"), str | None):
                raise ValueError("target.id must be a text")
            betas = pair.measured.get("betas", []) if isinstance(pair.measured, dict) else None
            if not isinstance(betas, list) or not all(isinstance(beta, int | float) for beta in betas):
                raise ValueError("measured must be an object, and its betas numbers")
            if pair.draft_kind not in (known := get_args(DraftKind)):
                raise ValueError(f"draft_kind is {pair.draft_kind!r}, this release knows {', '.join(known)}")
            if not isinstance(pair.self_draft, dict) or bool(pair.self_draft) != (pair.draft_kind != "model"):
                raise ValueError("self_draft must be an object, empty for draft_kind 'model' alone")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a pair description: {error}") from error
        return pair

    def target_id(self) -> str:
        """The target's hub name or folder.

        Raises:
            ValueError: the pair does not name one.
        """
        if not (name := self.target.get("id")):
            raise ValueError("pair.json names no target: give one with --target")
        return name


def load_model(
    name: str, dtype: Dtype = "auto", role: str = "model", device_name: str | None = None, layers: bool = True
) -> PreTrainedModel:
    """Load a causal language model, in eval mode, on the accelerator if there is one.

    Args:
        name: hub name or folder.
        dtype: "auto" keeps the checkpoint's.
        role: what to call it in messages.
        device_name: where to put it instead, such as "cpu" or "cuda:1".
        layers: False for its embeddings and head alone, which is all that is read.

    Raises:
        ValueError: there is no such model, or no such device.
    """
    _require_folder_or_hub_name(name, role)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device_name is not None:
        try:
            device = torch.empty(0, device=device_name).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"device of {role}: {device_name!r} is not one of this machine: {reason}") from error
    verbosity = logging_of_transformers.get_verbosity()
    if not layers:
        logging_of_transformers.set_verbosity_error()  # or it would list all that is not read
    try:
        options: dict[str, Any] = {}
        if not layers:
            options["config"] = AutoConfig.from_pretrained(name)
            options["config"].get_text_config().num_hidden_layers = 0
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    except NOT_LOADABLE as error:
        raise _not_loadable(name, role, error) from error
    finally:
        logging_of_transformers.set_verbosity(verbosity)
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ValueError(f"{role} {name}: lacks {len(missing)} of its weights, such as {missing[0]}; get it anew")
    what = name if layers else f"{name}, head only"
    logger.info("%s %s: %s on %s", role, what, str(model.dtype).removeprefix("torch."), device)
    nn.Module.to(model, device)
    model.eval().requires_grad_(False)
    return model


def load_tokenizer(name: str, role: str = "model") -> Tokenizer:
    """Load a tokenizer from a hub name or folder.

    Raises:
        ValueError: there is none.
    """
    _require_folder_or_hub_name(name, role)
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name)
        return tokenizer
    except NOT_LOADABLE as error:
        raise _not_loadable(name, f"tokenizer of {role}", error) from error


def refuse_other_tokenizer(target: Tokenizer, draft: Tokenizer, target_name: str, draft_name: str) -> None:
    """Compare two tokenizers by content.

    Raises:
        ValueError: they differ; names the first differing id.
    """
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    if target_vocab != draft_vocab:
        target_tokens = {index: token for token, index in target_vocab.items()}
        draft_tokens = {index: token for token, index in draft_vocab.items()}
        first = min(
            index
            for index in target_tokens.keys() | draft_tokens.keys()
            if target_tokens.get(index) != draft_tokens.get(index)
        )
        raise ValueError(
            f"draft {draft_name}: its tokenizer is not that of target {target_name}: id {first} is "
            f"{draft_tokens.get(first)!r} in the draft and {target_tokens.get(first)!r} in the target; "
            "use a draft made for this target"
        )
    probe = "Hello,  wörld!\n\n2024 x=1;\t<|im_end|>"
    if target.encode(probe) != draft.encode(probe):
        raise ValueError(
            f"draft {draft_name}: its tokenizer has the vocabulary of target {target_name} but splits text "
            "differently; copy the target's tokenizer files into the draft's folder"
        )


def stop_token_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end a text: those of the generation config and the tokenizer's end of sequence."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)


def describe_target(name: str, tokenizer: Tokenizer) -> dict[str, str | None]:
    """The `target` entry of a pair: where it is, and hashes that tell when it is another one."""
    config = AutoConfig.from_pretrained(name)
    # a folder is named absolutely, so that the pair works from any working directory
    location = str(Path(name).resolve()) if Path(name).is_dir() else name
    described = {key: value for key, value in config.to_dict().items() if key not in {"_name_or_path", "dtype"}}
    return {
        "id": location,
        "revision": getattr(config, "_commit_hash", None),
        "config_sha256": _sha256(described),
        "tokenizer_sha256": _sha256(sorted(tokenizer.get_vocab().items())),
    }


def refuse_other_target(
    found: dict[str, str | None],
    wanted: dict[str, str | None],
    what: str,
    keys: tuple[str, ...] = ("config_sha256", "tokenizer_sha256"),
) -> None:
    """Compare two descriptions of targets by these hashes, as far as both have them.

    Raises:
        ValueError: `what` was made for another target.
    """
    for key in keys:
        if None not in (found.get(key), wanted.get(key)) and found[key] != wanted[key]:
            part = key.removesuffix("_sha256")
            raise ValueError(
                f"{what}: made for target {found.get('id')}, whose {part} is not that of {wanted.get('id')}; "
                "use the same target, or make them anew"
            )


def save_draft_vocab(folder: Path, token_ids: Tensor) -> None:
    """Write the ids of the draft's reduced output vocabulary, int64 [draft_vocab], ascending."""
    save_file({"token_ids": token_ids.contiguous()}, folder / "draft_vocab.safetensors")


def load_draft_vocab(folder: Path) -> Tensor | None:
    """Ids of the draft's reduced output vocabulary, int64 [draft_vocab]; None when it has them all.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / "draft_vocab.safetensors"
    if not path.is_file():
        return None
    try:
        token_ids = load_file(path)["token_ids"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: not a draft's vocabulary: {error}; build the pair anew") from error
    if token_ids.dtype != torch.int64 or token_ids.ndim != 1 or len(token_ids) == 0 or token_ids.min() < 0:
        raise ValueError(f"{path}: not a list of token ids; build the pair anew")
    return token_ids


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write what a target that drafts for itself has of its own."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "self_draft.safetensors")


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """What a target that drafts for itself has of its own; empty when that is nothing.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / "self_draft.safetensors"
    if not path.is_file():
        return {}
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: cannot be read: {error}; build the pair anew") from error


def _require_folder_or_hub_name(name: str, role: str) -> None:
    """Say plainly that a folder is missing, before the hub is asked for it."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{role} {name}: the folder holds no config.json; give a Hugging Face model folder")
    elif path.exists() or not HUB_NAME.fullmatch(name):
        raise ValueError(f"{role} {name}: there is no such model folder")


def _not_loadable(name: str, what: str, error: Exception) -> ValueError:
    if not Path(name).is_dir():
        return ValueError(f"{what} {name}: there is no such folder, and the hub did not provide it")
    reason = str(error).strip().split("\n")[0].rstrip(": ")
    return ValueError(f"{what} {name}: cannot be loaded: {reason}")


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
