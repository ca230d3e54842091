"""The uniforms that sampling consumes: one independent, seeded stream per row."""

import numpy as np
import torch
from torch import Tensor


class RowNoise:
    """Streams of uniforms in [0, 1), one per row, so that a row's noise does not depend on its neighbours.

    Args:
        seed: the caller's seed.
        streams: a number per row that tells its stream from the others', such as the prompt's place in the list.
        device: where the uniforms are wanted.
    """

    def __init__(self, seed: int, streams: list[int], device: torch.device) -> None:
        self.device = device
        self.generators = []
        for stream in streams:
            (state,) = np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)
            self.generators.append(torch.Generator().manual_seed(int(state) >> 1))

    def draw(self, num_per_row: int) -> Tensor:
        """The next uniforms of every row, fp32 [rows, num_per_row]."""
        rows = [torch.rand(num_per_row, generator=generator) for generator in self.generators]
        return torch.stack(rows).to(self.device)

    def select_rows(self, rows: list[int]) -> None:
        self.generators = [self.generators[row] for row in rows]
