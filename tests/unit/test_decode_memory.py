"""The most memory that was held."""

from pathlib import Path

import pytest
import torch

import decode.memory
from decode.memory import Memory, PeakMemory

CPU = torch.device("cpu")
MEGABYTE = 2**20


def held(megabytes: int) -> Memory:
    with PeakMemory(CPU) as memory:
        torch.ones(megabytes * MEGABYTE, dtype=torch.uint8)
    if memory.found is None:
        pytest.skip("this system does not count the peak of a process anew")
    return memory.found


def test_more_is_held_where_more_is_allocated() -> None:
    small, large = held(1), held(256)
    again = held(1)
    assert small.growth_bytes < 64 * MEGABYTE < 200 * MEGABYTE < large.growth_bytes
    assert large.peak_bytes - small.peak_bytes > 128 * MEGABYTE
    # of each by itself: not the most of all that came before
    assert again.peak_bytes < large.peak_bytes - 128 * MEGABYTE
    assert again.peak_bytes > 0


def test_what_the_system_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    3000 kB\nVmRSS:\t    1000 kB\n")
    monkeypatch.setattr(decode.memory, "STATUS", status)
    monkeypatch.setattr(decode.memory, "CLEAR_REFS", tmp_path / "clear_refs")
    with PeakMemory(CPU) as memory:
        pass
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert memory.found == Memory(3000 * 1024, 2000 * 1024)


def test_nothing_is_claimed_where_the_peak_cannot_be_counted_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(decode.memory, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with PeakMemory(CPU) as memory:
        pass
    assert memory.found is None


def test_the_most_of_several() -> None:
    assert Memory.most([Memory(5, 1), Memory(4, 3)]) == Memory(5, 3)


@pytest.mark.gpu
def test_of_a_device_it_is_what_torch_allocated() -> None:
    device = torch.device("cuda")
    found = []
    for megabytes in (1, 64):
        with PeakMemory(device) as memory:
            torch.ones(megabytes * MEGABYTE, dtype=torch.uint8, device=device)
        assert memory.found is not None
        found.append(memory.found)
    assert [each.growth_bytes for each in found] == [MEGABYTE, 64 * MEGABYTE]
