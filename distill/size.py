"""What a run needs: bytes on the disk and in memory."""

import shutil
from pathlib import Path

from torch import nn

from train.config import TrainConfig

# a checkpoint holds the weights and at most two moments of each, in fp32; the best weights are kept apart
BYTES_PER_WEIGHT = 4
MOMENTS = 2


def disk_bytes(module: nn.Module, config: TrainConfig, saves_all: bool = True) -> int:
    """At most so many bytes will be in the run's folder at a time: checkpoints, one more being written, and the result.

    The draft's frozen weights are in the result alone; where they are the target's (`saves_all` false), not even there.
    """
    trainable = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in module.parameters()) if saves_all else trainable
    averaged = 1 if config.ema_decay else 0
    of_checkpoint = (1 + MOMENTS + averaged) * trainable * BYTES_PER_WEIGHT
    best = 2 * trainable * BYTES_PER_WEIGHT if config.select_by else 0
    return (config.keep_checkpoints + 1) * of_checkpoint + best + 2 * everything * BYTES_PER_WEIGHT


def refuse_full_disk(module: nn.Module, config: TrainConfig, saves_all: bool = True) -> None:
    """Raises ValueError when the disk will not hold the run, of which some may be there already."""
    folder = Path(config.output).absolute()
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = disk_bytes(module, config, saves_all) - there
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"output {config.output}: the run needs up to {needed / 1e9:.2f} GB of disk and {free / 1e9:.2f} GB are "
            "free; make room, lower train.keep_checkpoints, or give another output"
        )
