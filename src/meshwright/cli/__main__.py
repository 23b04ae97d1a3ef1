"""``python -m meshwright.cli``: the same as the ``meshwright`` command; how the ranks of a run are started."""

from __future__ import annotations

from meshwright.cli import main

main()
