"""Measures in which dtype the ops of a device add, prints it, and with ``--write`` renews the table of the package.

    python -m benchmarks.accumulators [--device cuda] [--write]

Other backends' entries in the table are kept.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import torch

from meshwright.compiler import numerics
from meshwright.runtime.accumulators import COUNTS, table

TABLE = Path(numerics.__file__).parent / "accumulators.toml"
HEAD = """\
# Which ops keep their partial sums in half precision. Made by benchmarks/accumulators.py: errors of the sums of
# 16, 256 and 4096 addends of random signs, in roundings; partial sums in half precision would give 3, 11 and 45.
"""


def section(device: str) -> dict[str, Any]:
    """What the table says of a device."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    found = table(device)
    ops = {
        dtype: {op: {"keeps": a.keeps, "errors": [round(e, 2) for e in a.errors]} for op, a in mine.items()}
        for dtype, mine in found.items()
    }
    return {"torch": torch.__version__.partition("+")[0], "device": name, **ops}


def text_of(tables: dict[str, Any]) -> str:
    """The file."""
    lines = [HEAD]
    for backend, entries in tables.items():
        lines += [f"[{backend}]", *(f'{k} = "{v}"' for k, v in entries.items() if isinstance(v, str)), ""]
        for dtype, ops in entries.items():
            if isinstance(ops, dict):
                lines.append(f"[{backend}.{dtype}]")
                lines += [
                    f'"{op}" = {{ keeps = "{e["keeps"]}", errors = {list(e["errors"])} }}' for op, e in ops.items()
                ]
                lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--write", action="store_true", help="renew the table of the package")
    options = parser.parse_args()
    made = section(options.device)
    print(f"torch {made['torch']} on {made['device']}; error of sums of {COUNTS} addends, in roundings")
    for dtype, ops in made.items():
        if isinstance(ops, dict):
            for op, entry in ops.items():
                print(f"{dtype:5} {op:42} {entry['keeps']:5} {entry['errors']}")
    if options.write:
        known = tomllib.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
        TABLE.write_text(text_of({**known, options.device: made}), encoding="utf-8")


if __name__ == "__main__":
    main()
