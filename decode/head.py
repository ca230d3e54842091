"""The output head of a model: which tokens it has."""

from torch import Tensor, nn
from transformers import PreTrainedModel


def reduce_output_vocabulary(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Let the head compute logits for these token ids only: column i of its output is token_ids[i].

    A view of the full checkpoint, taken after loading; the rows are copied, so tied embeddings stay whole.

    Raises:
        ValueError: an id that the head does not have.
    """
    head = model.get_output_embeddings()
    if (largest := int(token_ids.max())) >= head.out_features:
        raise ValueError(f"draft vocabulary: id {largest} is beyond the {head.out_features} of the draft's head")
    reduced = nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None, device="meta")
    reduced.weight = nn.Parameter(head.weight.detach()[token_ids].clone(), requires_grad=head.weight.requires_grad)
    if head.bias is not None:
        reduced.bias = nn.Parameter(head.bias.detach()[token_ids].clone(), requires_grad=head.bias.requires_grad)
    model.set_output_embeddings(reduced)
