"""How long it takes to verify the plan of a large model: relations, the end of all ranks, and the miniature.

    python -m benchmarks.equivalence [--layers 126] [--plan pp=16,fsdp=128,tp=8,schedule=1f1b] [--json FILE]

The model is Llama of 405B parameters, on the meta device. Seconds are of one process; memory is its peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers

from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.verify_end import verify_end
from meshwright.frontend.capture import capture
from meshwright.miniature import verify_miniature

PLAN = "pp=16,fsdp=128,tp=8,sp,schedule=1f1b,recompute"


@dataclass
class Measured:
    """Seconds of each part; bytes at the peak, before anything is verified and after."""

    layers: int
    plan: str
    ranks: int
    capture: float
    compile: float
    relations: float
    values: int
    forms: int
    end: float
    miniature: float
    ranks_of_miniature: int
    difference: float
    findings: int
    memory_before: int
    memory: int

    @property
    def verified_in(self) -> float:
        return self.relations + self.end + self.miniature


def llama_405b(layers: int, steps: int) -> transformers.LlamaForCausalLM:
    """Llama 3.1 of 405B parameters, of which ``layers`` layers; bf16, on the meta device."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=steps,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()


def measure(layers: int, plan: str, batch: int = 2048, length: int = 8192, microbatches: int = 16) -> Measured:
    """Capture, compile and verify one plan."""
    start = time.perf_counter()
    model = llama_405b(layers, length)
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    program = capture(model, {"input_ids": tokens, "labels": tokens}, optimizer, clip=1.0)
    captured = time.perf_counter()
    made = replace(preset(plan, program), microbatches=microbatches)
    compiled = compile_plan(program, made)
    done = time.perf_counter()
    before = _peak()
    found = check_relations(compiled)
    related = time.perf_counter()
    verify_end(compiled)
    ended = time.perf_counter()
    verified, small = verify_miniature(program, made)
    end = time.perf_counter()
    return Measured(
        layers=layers,
        plan=plan,
        ranks=made.mesh.ranks,
        capture=captured - start,
        compile=done - captured,
        relations=related - done,
        values=found.values,
        forms=found.forms,
        end=ended - related,
        miniature=end - ended,
        ranks_of_miniature=small.plan.mesh.ranks,
        difference=verified.worst,
        findings=len(found.findings),
        memory_before=before,
        memory=_peak(),
    )


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--plan", default=PLAN)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = measure(args.layers, args.plan)
    print(f"Llama of 405B parameters, {found.layers} layers, {found.plan} on {found.ranks} ranks")
    print(
        f"  captured in {found.capture:.1f} s, compiled in {found.compile:.1f} s, {found.memory_before / 2**30:.2f} GiB"
    )
    said = f"{found.values} values, {found.forms} forms, {found.findings} findings"
    print(f"  relations   {found.relations:6.1f} s   {said}")
    print(f"  deadlock    {found.end:6.1f} s")
    told = f"{found.ranks_of_miniature} ranks, difference {found.difference:.1e}"
    print(f"  miniature   {found.miniature:6.1f} s   {told}")
    print(f"  together    {found.verified_in:6.1f} s   peak {found.memory / 2**30:.2f} GiB")
    if args.json:
        args.json.write_text(json.dumps(asdict(found) | {"verified_in": found.verified_in}, indent=2) + "\n")


if __name__ == "__main__":
    main()
