"""An ordinary accelerate script: it takes its optimizer from the DeepSpeed config where there is one."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

LR = 1e-3


def make_batches(vocab=128, count=32, length=16):
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(0, vocab, (count, 1), generator=generator)
    return TensorDataset((start + 3 * torch.arange(length)) % vocab)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--cpu", action="store_true", help="without DeepSpeed, on the CPU")
    parser.add_argument("--accumulation", type=int, default=1)
    return parser.parse_args()


def train(accelerator, model, optimizer, scheduler, loader, history):
    model.train()
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
        norm = None if norm is None else float(norm)
        history.append({"loss": mean, "grad_norm": norm, "lr": scheduler.get_last_lr()[0]})


def main():
    args = parse()
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=args.accumulation)
    set_seed(3)
    model = AutoModelForCausalLM.from_pretrained(args.model_path)
    loader = DataLoader(make_batches(), batch_size=2)
    plugin = accelerator.state.deepspeed_plugin
    config = plugin.deepspeed_config if plugin is not None else {}

    optimizer_class = DummyOptim if "optimizer" in config else torch.optim.AdamW
    optimizer = optimizer_class(model.parameters(), lr=LR, weight_decay=0.0)
    if "scheduler" in config:
        scheduler = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=2)
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    history, again = [], []
    train(accelerator, model, optimizer, scheduler, loader, history)
    accelerator.save_state(args.output_dir)
    train(accelerator, model, optimizer, scheduler, loader, history)
    accelerator.load_state(args.output_dir)
    train(accelerator, model, optimizer, scheduler, loader, again)

    state = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        unwrapped.save_pretrained(f"{args.output_dir}/final", state_dict=state)
        report = {"history": history, "again": again, "processes": accelerator.num_processes}
        report["type"] = str(accelerator.distributed_type)
        with open(args.report, "w") as file:
            json.dump(report, file)


if __name__ == "__main__":
    main()
