"""What computed a step: code, libraries, threads and a probe of the arithmetic, for the ledger.

Two hosts that agree on all of them compute the same step; `differences` says on what they do not.
"""

import functools
import hashlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
import torch

import headrace
from headrace.kernels import invariant
from headrace.wire.records import TrainStep

LIBRARIES: Final = ("torch", "numpy", "msgspec", "safetensors", "zstandard")
CODE: Final = ("trainer", "policy", "kernels", "wire")
"""The packages whose source decides what a step computes."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    libraries: dict[str, str]
    threads: int
    kernel_probe: str


def collect() -> Provenance:
    """Of this process; asked in the thread that computes, since torch counts threads per thread."""
    libraries = {name: version(name) for name in LIBRARIES}
    libraries["python"] = platform.python_version()
    libraries["cpu"] = torch.backends.cpu.get_cpu_capability()
    return Provenance(
        code=f"{headrace.__version__}+{_source_sha256()[:16]}",
        libraries=libraries,
        threads=torch.get_num_threads(),
        kernel_probe=invariant.probe(),
    )


def differences(step: TrainStep, now: Provenance) -> list[str]:
    """`torch: 2.14 then, 2.15 now` for each thing that is not as it was when `step` was computed."""
    pairs = [
        ("code", step.code, now.code),
        ("threads", step.threads, now.threads),
        ("kernel_probe", step.kernel_probe, now.kernel_probe),
        *(
            (name, step.libraries.get(name), now.libraries.get(name))
            for name in sorted(step.libraries.keys() | now.libraries.keys())
        ),
    ]
    return [f"{name}: {then} then, {here} now" for name, then, here in pairs if then != here]


@functools.cache
def _source_sha256() -> str:
    total = hashlib.sha256()
    root = Path(headrace.__file__).parent
    for package in CODE:
        for path in sorted((root / package).rglob("*.py")):
            total.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return total.hexdigest()
