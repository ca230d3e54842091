"""Several documents in one sequence, none of which sees another.

transformers takes a restart of the position ids for a new document and masks attention accordingly, if there is
neither an attention mask nor a cache (masking_utils.find_packed_sequence_indices).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .data import Row

# Tokens of each of two documents that find out whether a model keeps them apart.
PROBE_LENGTH = 8


def pack(rows: Sequence[Row], length: int) -> list[Row]:
    """Puts rows together into sequences of at most `length` tokens, by best-fit decreasing: the same every time.

    Args:
        rows: with input_ids and response_mask, [tokens]; the documents.
        length: most tokens in a sequence.

    Returns:
        input_ids: int32 [tokens], documents one after another.
        response_mask: bool [tokens], false at each document's first token, which nothing in it predicts.
        position_ids: int32 [tokens], from 0 in each document.
        places: of the documents among the rows, in order.

    Raises:
        ValueError: a row longer than `length`.
    """
    sizes = [len(row["input_ids"]) for row in rows]
    if sizes and max(sizes) > length:
        number = next(number for number, size in enumerate(sizes, start=1) if size > length)
        raise ValueError(
            f"packing: row {number} has {sizes[number - 1]} tokens, more than {length}; cut it, or raise length"
        )
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens that still fit into a sequence, and which one; ascending
    for place in sorted(range(len(rows)), key=sizes.__getitem__, reverse=True):
        best = bisect_left(room, (sizes[place], 0))
        left, sequence = room.pop(best) if best < len(room) else (length, len(sequences))
        if sequence == len(sequences):
            sequences.append([])
        sequences[sequence].append(place)
        insort(room, (left - sizes[place], sequence))
    return [_joined([rows[place] for place in places]) | {"places": places} for places in map(sorted, sequences)]


def collate_packed(rows: Sequence[Row], padding_id: int) -> dict[str, torch.Tensor]:
    """Packed rows to the tensors of one batch, padded on the right with a document that nothing is learnt from.

    Args:
        rows: as `pack` gives them.
        padding_id: any token id.

    Returns:
        input_ids int64, position_ids int64 and predicts bool, [rows, longest]: predicts[b, t] is true where the token
        after position t belongs to a response of the same document.
    """
    shape = (len(rows), max(len(row["input_ids"]) for row in rows))
    input_ids = torch.full(shape, padding_id)
    position_ids = torch.zeros(shape, dtype=torch.long)
    predicts = torch.zeros(shape, dtype=torch.bool)
    for place, row in enumerate(rows):
        size = len(row["input_ids"])
        input_ids[place, :size] = torch.as_tensor(row["input_ids"])
        position_ids[place, :size] = torch.as_tensor(row["position_ids"])
        position_ids[place, size:] = torch.arange(shape[1] - size)
        predicts[place, : size - 1] = torch.as_tensor(row["response_mask"])[1:]
    return {"input_ids": input_ids, "position_ids": position_ids, "predicts": predicts}


@torch.no_grad()
def refuse_unpackable(model: Any) -> None:
    """One pass over two documents in either order: a document's logits must not tell what stood before it.

    Raises:
        ValueError: they do, so that the model must not be trained on packed rows.
    """
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(vocab_size, (2, PROBE_LENGTH), generator=generator)
    input_ids = torch.stack([torch.cat([first, second]), torch.cat([second, first])]).to(model.device)
    position_ids = torch.arange(PROBE_LENGTH, device=model.device).repeat(2, 2)
    training = model.training
    model.eval()  # dropout would make the same document differ
    logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    model.train(training)
    after, alone = logits[0, PROBE_LENGTH:].float(), logits[1, :PROBE_LENGTH].float()
    same = (after - alone).abs().max() <= torch.finfo(logits.dtype).eps ** 0.5 * alone.abs().max()
    if not same:
        raise ValueError(
            f"packing_length: is not possible, for model type {model.config.model_type!r} lets packed documents see "
            "each other; use null"
        )


def _joined(rows: Sequence[Row]) -> Row:
    masks = [np.array(row["response_mask"], np.bool_) for row in rows]
    for mask in masks:
        mask[:1] = False
    return {
        "input_ids": np.concatenate([np.asarray(row["input_ids"], np.int32) for row in rows]),
        "response_mask": np.concatenate(masks),
        "position_ids": np.concatenate([np.arange(len(mask), dtype=np.int32) for mask in masks]),
    }
