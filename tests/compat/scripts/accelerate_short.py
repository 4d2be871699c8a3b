"""A few steps with everything that ``accelerate launch`` decides taken from its environment; prints what it was."""

import functools
import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=2)
    if "optimizer" in config:
        optimizer = DummyOptim(model.parameters(), lr=1e-2)
        make = functools.partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=make)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
    if accelerator.is_main_process:
        report = {
            "processes": accelerator.num_processes,
            "stage": model.zero_optimization_stage(),
            "batch": model.get_batch_info(),
            "dtype": str(model.dtype),
            "clipping": model.gradient_clipping(),
            "steps": model.global_steps,
            "zero": model.config["zero_optimization"],
            "losses": losses,
        }
        with open(sys.argv[1], "w") as file:
            json.dump(report, file)


if __name__ == "__main__":
    main()
