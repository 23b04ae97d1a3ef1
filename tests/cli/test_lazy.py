"""Nothing imports torch before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import meshwright; meshwright.__version__; meshwright.Plan; dir(meshwright)",
        "import meshwright.cli",
        "from typer.testing import CliRunner; from meshwright.cli import app\n"
        "for c in ([], ['compile'], ['run'], ['inspect'], ['verify']):\n"
        "    assert CliRunner().invoke(app, [*c, '--help']).exit_code == 0",
        "from typer.testing import CliRunner; from meshwright.cli import app\n"
        "assert 'torch' in CliRunner().invoke(app, ['version']).output",
        "from typer.testing import CliRunner; from meshwright.cli import app\n"
        "assert CliRunner().invoke(app, ['compile', 'a.mw', '--set', 'a=b']).exit_code == 1",
    ],
    ids=["package", "commands", "help", "version", "wrong arguments"],
)
def test_without_torch(code: str) -> None:
    subprocess.run([sys.executable, "-c", f"{code}\nimport sys; assert 'torch' not in sys.modules"], check=True)


def test_the_public_names() -> None:
    import meshwright

    for name in meshwright.__all__:
        assert getattr(meshwright, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = meshwright.paralelize
