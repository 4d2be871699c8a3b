"""The loop of accelerate's guide to sequence parallelism; how sequences are divided comes from the command line."""

import json
import sys

import torch
from accelerate import Accelerator
from deepspeed.runtime.utils import move_to_device
from deepspeed.utils import groups
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def samples():
    """Eight sequences; of some, no token of a part counts."""
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[1::3, :9] = -100
    positions = torch.arange(16).expand(8, -1)
    return [{"input_ids": ids[row], "labels": labels[row], "position_ids": positions[row]} for row in range(8)]


def build():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def train(accelerator):
    """Losses of all micro-batches, norms of all steps, and the size of a sequence's group."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    unwrapped = accelerator.unwrap_model(model)
    group, size = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            batch = move_to_device(batch, model.device)
            labels = batch["shift_labels"]
            logits = model(**batch).logits
            loss = unwrapped.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=64)
            each = torch.distributed.nn.functional.all_gather(loss, group=group)
            counts = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
            total = sum(each[rank] * counts[rank] for rank in range(size) if counts[rank] > 0)
            loss = total / max(sum(counts), 1)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if accelerator.sync_gradients:
            norms.append(float(model.get_global_grad_norm()))
    return {"losses": losses, "norms": norms, "size": size, "steps": model.global_steps}


if __name__ == "__main__":
    accelerator = Accelerator()
    report = train(accelerator)
    if accelerator.is_main_process:
        with open(sys.argv[1], "w") as file:
            json.dump(report, file)
