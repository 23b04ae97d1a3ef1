"""Train a transformers Llama on the bytes of Python's own library: four processes, or virtual ranks without torchrun.

torchrun --nproc-per-node 4 examples/hf_llama.py
"""

import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright

STEPS, SAMPLES, TIME = int(sys.argv[1]) if len(sys.argv) > 1 else 100, 16, 64
sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

files = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
generator = torch.Generator().manual_seed(0)  # every rank draws the same global batch


def batch() -> dict[str, torch.Tensor]:
    starts = torch.randint(len(text) - TIME, (SAMPLES, 1), generator=generator)
    tokens = text[starts + torch.arange(TIME)].long()
    return {"input_ids": tokens, "labels": tokens}


virtual = None if "RANK" in os.environ else 4
step = meshwright.parallelize(model, optimizer=optimizer, batch=batch(), plan="fsdp=2,tp=2", clip=1.0, virtual=virtual)
for number in range(STEPS):
    loss = step(batch())
    schedule.step()
    if os.environ.get("RANK", "0") == "0" and number % 10 == 0:
        print(f"step {number:3}  loss {loss:.3f}  gradient norm {step.norm:.3f}", flush=True)
model.load_state_dict(step.full_state_dict())  # whole again, under its own names
