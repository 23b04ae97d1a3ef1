"""A small program, compiled once for all tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshwright.cli import app

SMALL = """\
axes
    b: batch
    t: time = 8
    d = 16
    f = 32
    vocab = 32

model small(tokens: int[b t]) -> [b t vocab]
    param E[vocab d] ~ normal(0.02)
    param W1[d f], W2[f d] ~ normal(0.02)
    x = E[tokens]
    x = x + gelu(norm(x over d) * W1) * W2
    norm(x over d) * E -> [b t vocab]

train
    loss cross_entropy(small(tokens) over vocab, next(tokens over t))
    optimizer AdamW(lr = 0.01)
    learning rate cosine(warmup = 2)
    clip 1.0
    batch 8
    steps 4
    data random
"""


def invoke(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a small ``.mw`` file."""
    path = tmp_path_factory.mktemp("small") / "small.mw"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def built(small: Path) -> Path:
    """The small program compiled for two ranks."""
    folder = small.parent / "build"
    result = invoke("compile", small, "--plan", "fsdp=2", "-o", folder)
    assert result.exit_code == 0, result.output
    return folder
