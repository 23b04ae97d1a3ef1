"""What a run tells of each step, as JSON lines that other programs read."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch


@dataclass(frozen=True)
class Metrics:
    """One step of a run. ``memory`` and ``peak`` are bytes of this rank's process (of the device, on a GPU)."""

    step: int
    loss: float
    norm: float | None
    lr: float | None
    tokens_per_second: float
    seconds: float
    memory: int
    peak: int


class MetricsFile:
    """Appends one JSON object per step; flushed at once, so that a run can be followed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self.path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        self._stream.write(json.dumps(asdict(metrics)) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Metrics]:
    """The steps that a file tells of. A line that was cut short by a crash is left out."""
    result = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            result.append(Metrics(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return result


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Bytes in use and their peak: of the device's allocator on a GPU, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return peak, peak
    sizes = {words[0]: int(words[1]) * 1024 for line in status.splitlines() if (words := line.split())[0] in _SIZES}
    return sizes["VmRSS:"], sizes.get("VmHWM:", peak)


_SIZES = ("VmRSS:", "VmHWM:")


def forget_peak(device: torch.device) -> None:
    """Let the peak be that of what follows: compiling and reading may have needed more than a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # on other systems, or where that is not allowed, the peak stays what it was
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
