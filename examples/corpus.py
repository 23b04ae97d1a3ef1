"""Write a corpus of bytes that every machine with Python has: the source text of its standard library.

python examples/corpus.py corpus.bin
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main(target: str) -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    Path(target).write_bytes(text)
    print(f"{target}: {len(text) / 1e6:.1f} MB from {len(files)} files of the standard library")


if __name__ == "__main__":
    main(*sys.argv[1:])
