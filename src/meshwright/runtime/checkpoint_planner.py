"""Our shards as ``torch.distributed.checkpoint`` sees them: blocks of whole tensors.

A shard may consist of several blocks of the whole tensor (a fused projection cut by its heads, say). Each block
is written as a chunk of its own, so a checkpoint knows nothing of meshes: on loading, every block that a rank needs
is read from whatever chunks overlap it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.pipeline_program import Compiled, copies_of
from meshwright.compiler.graph.program import Value
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.runtime.holdings import Held, Holdings, held
from meshwright.runtime.layout import Box, Coordinates, boxes, holder


@dataclass(frozen=True)
class Shards:
    """The shards that this process has: of one rank, or of all ranks of a virtual cluster."""

    rank_program: Compiled
    ranks: Sequence[tuple[Coordinates, Holdings]]

    @property
    def mesh(self) -> Mesh:
        return self.rank_program.mesh

    def held(self) -> Mapping[Value, Held]:
        """What these ranks hold."""
        everything = held(self.rank_program)
        return {v: place for v, place in everything.items() if any(place.on(at) for at, _ in self.ranks)}

    def owned(self) -> Mapping[Value, Held]:
        """The same without further copies of tied parameters, which are saved once."""
        copies = copies_of(self.rank_program)
        return {v: place for v, place in self.held().items() if v.name not in copies}


def stored_name(value: Value) -> str:
    """The name of a tensor in a checkpoint: ``parameter/model.w``, ``state/model.w/exp_avg``."""
    return f"{value.kind}/{value.name}"


class ShardsSavePlanner(SavePlanner):
    """Writes each block of each tensor once, copies spread over the ranks that have them."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._blocks: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = []
        mesh = self._shards.mesh
        for value, place in self._shards.owned().items():
            name = stored_name(value)
            writer = holder(zlib.crc32(name.encode()), place.sharding, mesh)
            if place.holders is not None:
                writer[PIPE] = place.holders[0]
            properties = TensorProperties(dtype=place.spec.dtype)
            for coordinates, holdings in self._shards.ranks:
                if any(coordinates[axis] != at for axis, at in writer.items()):
                    continue
                local = holdings.of(value.kind)[value.name]
                for box in boxes(place.sharding, mesh, coordinates):
                    index = MetadataIndex(name, torch.Size(box.whole))
                    chunk = ChunkStorageMetadata(torch.Size(box.whole), torch.Size(box.size))
                    data = TensorWriteData(chunk, properties, torch.Size(place.spec.shape))
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                    self._blocks[index] = box.view(local)
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            written = sum(math.prod(c.sizes) for c in tensor.chunks)
            if written != math.prod(tensor.size):
                raise InternalError(f"{written} of {math.prod(tensor.size)} elements of {name} would be written")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._blocks[write_item.index].detach()


class ShardsLoadPlanner(LoadPlanner):
    """Reads every block that this process needs, in place, from the chunks that overlap it."""

    def __init__(self, shards: Shards, names: Mapping[Value, str]) -> None:
        self._shards = shards
        self._names = names
        self._targets: list[Tensor] = []
        self._metadata = Metadata({})

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for value, place in self._shards.held().items():
            if value not in self._names:
                continue
            stored = self._metadata.state_dict_metadata[self._names[value]]
            assert isinstance(stored, TensorStorageMetadata)
            for coordinates, holdings in self._shards.ranks:
                if not place.on(coordinates):
                    continue
                local = holdings.of(value.kind)[value.name]
                for box in boxes(place.sharding, self._shards.mesh, coordinates):
                    for number, chunk in enumerate(stored.chunks):
                        items.extend(self._read(self._names[value], box, box.view(local), number, chunk))
        return LoadPlan(items)

    def _read(self, name: str, box: Box, target: Tensor, number: int, chunk: ChunkStorageMetadata) -> list[ReadItem]:
        begin = [max(a, b) for a, b in zip(box.whole, chunk.offsets, strict=True)]
        ends = zip(box.whole, box.size, chunk.offsets, chunk.sizes, strict=True)
        lengths = [min(a + n, b + m) - s for s, (a, n, b, m) in zip(begin, ends, strict=True)]
        if any(n <= 0 for n in lengths):
            return []
        inside = [s - a for s, a in zip(begin, box.whole, strict=True)]
        for d, (start, length) in enumerate(zip(inside, lengths, strict=True)):
            target = target.narrow(d, start, length)
        self._targets.append(target)
        return [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(name, torch.Size(box.whole), len(self._targets) - 1),
                dest_offsets=torch.Size(inside),
                storage_index=MetadataIndex(name, chunk.offsets, number),
                storage_offsets=torch.Size(s - b for s, b in zip(begin, chunk.offsets, strict=True)),
                lengths=torch.Size(lengths),
            )
        ]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise InternalError(f"a checkpoint has bytes for '{read_item.dest_index.fqn}'")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        return self._targets[read_item.dest_index.index].detach()

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # what resolve_tensor gave is the memory of the shard itself
