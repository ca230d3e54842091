"""How much memory was held at most, as the system or the device counts it."""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

# writing 5 to the first lets the system count the peak in the second anew, and costs nothing else
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """What was held while something ran.

    Attributes:
        peak_bytes: the most; on a CPU of the whole process, so that every model it has loaded is in it, and on CUDA
            what torch has allocated on the device.
        growth_bytes: how much more that is than at the beginning; on a CPU what was freed and kept by the allocator is
            held already, and using it again is no growth.
    """

    peak_bytes: int
    growth_bytes: int

    @classmethod
    def most(cls, memories: "list[Memory]") -> "Memory":
        """The largest of each."""
        return cls(max(each.peak_bytes for each in memories), max(each.growth_bytes for each in memories))


class PeakMemory:
    """Context manager that finds the most memory that was held within.

    Args:
        device: whose memory is meant.

    Attributes:
        found: None until the end, and where it cannot be measured: on a CPU whose system is not Linux or keeps
            `/proc` shut, and on accelerators other than CUDA's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: Memory | None = None

    def __enter__(self) -> "PeakMemory":
        self.held_bytes: int | None = None
        gc.collect()  # garbage that goes while we look would hide as much growth
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.held_bytes = torch.cuda.memory_allocated(self.device)
        elif self.device.type == "cpu" and _count_peak_anew():
            self.held_bytes = _bytes_of_process("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.held_bytes is None:
            return
        on_cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_cuda else _bytes_of_process("VmHWM")
        if peak is not None:
            self.found = Memory(peak, max(0, peak - self.held_bytes))


def _count_peak_anew() -> bool:
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _bytes_of_process(name: str) -> int | None:
    """A line such as `VmRSS:     2272 kB`; None where the system has none of that name."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None
