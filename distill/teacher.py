"""Texts to batches, models to hidden states, hidden states to logits and log-probabilities."""

import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from train.engine import has_bf16_products

Batch = dict[str, Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])

# Programs of one function: with and without gradients, into the first layer or a later one, for few or many tokens, …
COMPILED_VARIANTS = 64


class Head:
    """A model's output head: what it does to final hidden states to make logits of some tokens.

    Args:
        model: whose head it is; the weights are shared, not copied, unless token_ids picks some.
        token_ids: int64 [columns], the tokens wanted; None for all.
        role: what to call the model in messages.

    Raises:
        ValueError: the model makes its logits in a way that is not known here.
    """

    def __init__(self, model: PreTrainedModel, token_ids: Tensor | None = None, role: str = "target") -> None:
        head = model.get_output_embeddings()
        self.weight: Tensor = head.weight.detach()
        self.bias: Tensor | None = None if head.bias is None else head.bias.detach()
        self.token_ids = token_ids
        config = model.config.get_text_config()
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them
        self.scale: float = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        self.bias_rows = self.bias if self.bias is None or token_ids is None else self.bias[token_ids]
        self._refuse_other_logits(model, role)

    def finish(self, products: Tensor) -> Tensor:
        """Logits of the wanted tokens from products of hidden states and their rows of the weight, fp32."""
        return self._finish(products, self.bias_rows)

    def _logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # rounded as where the hidden states were made: normalisers that were kept with them are of such logits
        return self._finish((hidden.to(weight.dtype) @ weight.T).to(hidden.dtype), bias)

    def _finish(self, products: Tensor, bias: Tensor | None) -> Tensor:
        return self.scaled(products.float() if bias is None else products.float() + bias.float())

    def scaled(self, logits: Tensor) -> Tensor:
        """What the model does to the outputs of its head, fp32."""
        if self.scale != 1:
            logits = self.scale * logits
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    @torch.no_grad()
    def _refuse_other_logits(self, model: PreTrainedModel, role: str) -> None:
        """A model that does more to its logits would be misread without a sign: compare those of one pass."""
        input_ids = torch.tensor([[0, 1]], device=model.device)
        batch = {"input_ids": input_ids, "predicts": input_ids >= 0}
        ours = self._logits(final_hidden_states(model, batch), self.weight, self.bias)
        theirs = model(input_ids=input_ids, use_cache=False).logits[0].float()
        if (ours - theirs).abs().max() > 0.02 * theirs.abs().max():
            raise ValueError(
                f"{role}: model type {model.config.model_type!r} makes its logits from its hidden states in a way "
                f"that is not known here; use another {role}"
            )


class TeacherHead(Head):
    """The target's frozen head: final hidden states in, log-probabilities out.

    Args:
        target: the model whose head it is; the head's weights are shared, not copied.
        token_ids: int64 [draft_vocab], the columns wanted; None for all.
        temperature: of the distribution; above 0.

    Raises:
        ValueError: the target makes its logits in a way that is not known here.
    """

    def __init__(self, target: PreTrainedModel, token_ids: Tensor | None = None, temperature: float = 1.0) -> None:
        super().__init__(target, token_ids)
        self.temperature = temperature
        self.weight_rows = self.weight if token_ids is None else self.weight[token_ids]

    def log_probabilities(self, hidden: Tensor, log_normalizers: Tensor | None = None) -> Tensor:
        """log p of the wanted tokens, normalised over the whole vocabulary.

        Args:
            hidden: [tokens, hidden], what enters the head.
            log_normalizers: fp32 [tokens], logsumexp of the whole head's logits at temperature 1, which spares
                computing them; of no use at another temperature.

        Returns:
            fp32 [tokens, draft_vocab].
        """
        if log_normalizers is not None and self.temperature == 1:
            with torch.autocast(hidden.device.type, enabled=False):  # as precisely as the normalisers were made
                return self._logits(hidden, self.weight_rows, self.bias_rows) - log_normalizers.unsqueeze(1)
        log_p = (self._logits(hidden, self.weight, self.bias) / self.temperature).log_softmax(dim=-1)
        return log_p if self.token_ids is None else log_p[:, self.token_ids]

    def log_normalizers(self, hidden: Tensor) -> Tensor:
        """What `log_probabilities` can be spared: logsumexp of the whole head's logits at temperature 1, [tokens]."""
        return self._logits(hidden, self.weight, self.bias).logsumexp(dim=-1)


def collate(rows: list[dict[str, Any]], padding_id: int) -> Batch:
    """Rows of responses to the tensors of one batch.

    Args:
        rows: with input_ids and response_mask.
        padding_id: any token id.

    Returns:
        input_ids int64 and predicts bool, [rows, length]: predicts[b, t] is true where the token after position t
        belongs to the response. Padding is on the right, where no token of a causal model sees it: no mask is needed.
    """
    width = max(len(row["input_ids"]) for row in rows)
    input_ids = torch.full((len(rows), width), padding_id)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[place, :length] = torch.tensor(row["input_ids"])
        predicts[place, : length - 1] = torch.tensor(row["response_mask"][1:])
    return {"input_ids": input_ids, "predicts": predicts}


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """What enters the head at every position, [rows, length, hidden].

    Args:
        model: whose head it is.
        batch: input_ids int64 [rows, length]; position_ids too where they do not count from 0; attention_mask bool
            [rows, 1, length, length] where a token does not see all before it.
    """
    inputs: Batch = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    if (seen := batch.get("attention_mask")) is not None:
        # added to the scores, which every kind of attention can; eager ones would not know what to do with a bool
        lowest = torch.finfo(model.dtype).min
        inputs["attention_mask"] = torch.zeros_like(seen, dtype=model.dtype).masked_fill(~seen, lowest)
    hidden: Tensor = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
    return hidden


def final_hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """What enters the head where a response token is predicted, [tokens, hidden], in the order of `collate`."""
    return hidden_states(model, batch)[batch["predicts"]]


def multiplies_float32_sooner(model: PreTrainedModel) -> bool:
    """Whether this is a CPU that takes the model's bf16 by way of float32, which takes three times as long."""
    in_bf16 = model.device.type == "cpu" and model.dtype == torch.bfloat16 and not getattr(model, "is_quantized", False)
    return in_bf16 and not has_bf16_products()


def compile_layers(model: PreTrainedModel) -> None:
    """One program for all layers, whatever the number and length of texts; it is made when they are first used.

    Raises:
        ValueError: there is nothing to make it with.
    """
    compiler = os.environ.get("CXX", "g++")
    if model.device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(f"compile: true needs a C++ compiler, and there is no {compiler}; install one, or use false")
    decoder: Any = model.get_decoder()
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"compile: model type {model.config.model_type!r} has no layers that are known here; use false"
        )
    for module in (*layers, *([decoder.norm] if hasattr(decoder, "norm") else [])):
        module.compile(dynamic=True, recompile_limit=COMPILED_VARIANTS)


def compiled(function: Function) -> Function:
    """The same, as one program for all shapes."""
    # torch 2.13 leaves recompile_limit out of the declared overloads
    program: Function = torch.compile(  # type: ignore[call-overload]
        function, dynamic=True, recompile_limit=COMPILED_VARIANTS
    )
    return program
