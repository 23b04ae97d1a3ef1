"""The command line: one file per command, nothing but arguments and printing.

Nothing here imports torch before a command runs, so ``meshwright --help`` answers at once.
"""

from __future__ import annotations

import typer

from meshwright.cli.calibrate import calibrate_command
from meshwright.cli.check import check_command
from meshwright.cli.clusters import clusters_command
from meshwright.cli.compile import compile_command
from meshwright.cli.faults import Commands
from meshwright.cli.inspect import inspect_command
from meshwright.cli.plan import plan_command
from meshwright.cli.run import run_command
from meshwright.cli.schedule import schedule_command
from meshwright.cli.simulate import simulate_command
from meshwright.cli.verify import verify_command
from meshwright.cli.version import version_command

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Compile a training step written for one device into the programs that a cluster runs.",
)
app.command("plan")(plan_command)
app.command("compile")(compile_command)
app.command("run")(run_command)
app.command("inspect")(inspect_command)
app.command("simulate")(simulate_command)
app.command("schedule")(schedule_command)
app.command("verify")(verify_command)
app.command("check")(check_command)
app.command("calibrate")(calibrate_command)
app.command("clusters")(clusters_command)
app.command("version")(version_command)


def main() -> None:
    """The entry point of the ``meshwright`` command."""
    app(prog_name="meshwright")
