"""The variables of launchers."""

from __future__ import annotations

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.mesh import Mesh
from meshwright.runtime.environment import Place, complete, place_of
from meshwright.runtime.worker import check_world_size
from tests.unit.runtime import toy


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, Place(0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Place(3, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0"}, Place(5, 6, 0)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Place(1, 2, 1)),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}, Place(0, 2, 0)),
    ],
)
def test_launchers_are_understood(variables: dict[str, str], place: Place) -> None:
    assert place_of(variables) == place


def test_values_that_cannot_be_are_told() -> None:
    with pytest.raises(MeshwrightError, match=r"E0609.*RANK='x' is not a number"):
        place_of({"RANK": "x"})
    with pytest.raises(MeshwrightError, match=r"E0609.*RANK=4 does not fit WORLD_SIZE=4"):
        place_of({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(MeshwrightError, match=r"E0609.*not MASTER_ADDR"):
        complete(Place(0, 2, 0), {})


def test_a_single_process_needs_no_launcher() -> None:
    variables: dict[str, str] = {}
    complete(Place(0, 1, 0), variables)
    assert variables["MASTER_ADDR"] == "127.0.0.1"


def test_the_number_of_ranks_must_be_that_of_the_mesh() -> None:
    program = toy.program(Mesh((("data", 2), ("tensor", 2))))
    check_world_size(program, Place(0, 4, 0))
    with pytest.raises(MeshwrightError, match=r"E0601.*compiled for 4 ranks \(data=2, tensor=2\), 2 were started"):
        check_world_size(program, Place(0, 2, 0))
