"""The most memory that was held."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import decode.memory
from decode.memory import Memory, PeakMemory

CPU = torch.device("cpu")
MEGABYTE = 2**20


# in a process of its own: what other tests left behind may go at any time, and hide as much growth
HELD = """
import torch
from decode.memory import PeakMemory
for megabytes in (1, 256, 1):
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(megabytes * 2**20, dtype=torch.uint8)
    if memory.found is not None:
        print(memory.found.peak_bytes, memory.found.growth_bytes)
"""


def test_more_is_held_where_more_is_allocated() -> None:
    result = subprocess.run([sys.executable, "-c", HELD], check=True, capture_output=True, text=True)
    found = [Memory(*map(int, line.split())) for line in result.stdout.splitlines()]
    if not found:
        pytest.skip("this system does not count the peak of a process anew")
    small, large, again = found
    assert small.growth_bytes < 64 * MEGABYTE < 200 * MEGABYTE < large.growth_bytes
    assert large.peak_bytes - small.peak_bytes > 128 * MEGABYTE
    # of each by itself: not the most of all that came before
    assert again.peak_bytes < large.peak_bytes - 128 * MEGABYTE
    assert again.peak_bytes > 0


def test_garbage_hides_no_growth() -> None:
    class Garbage:
        pass

    garbage = Garbage()
    garbage.itself, garbage.held = garbage, torch.ones(256 * MEGABYTE, dtype=torch.uint8)  # type: ignore[attr-defined]
    alive = weakref.ref(garbage)
    del garbage
    gc.disable()
    try:
        assert alive() is not None
        with PeakMemory(CPU):
            assert alive() is None
    finally:
        gc.enable()


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
