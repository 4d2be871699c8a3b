"""Scripts to tune, as users write them: without a Trainer, and with faults."""

TRAIN = """
import argparse, os, sys, time
import torch
from torch import nn
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--steps", type=int, default=10_000)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
if TUNES_ITSELF:
    from ds_hf.autotune import tuned_config
    args.deepspeed_config = tuned_config(args.deepspeed_config, trials=1, confirm=False, results_dir="results")
    print("trains with", args.deepspeed_config, flush=True)

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"loss": x.square().mean()}

FAULT
torch.manual_seed(0)
net = Net(args.width)
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
for step in range(args.steps):
    micro = engine.train_micro_batch_size_per_gpu()
    loss = engine(torch.randn(micro, 8, args.width))["loss"]
    engine.backward(loss)
    engine.step()
print("trained to the end")
"""

SLOW_DATA = """
import time
import torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(0.02)
        return {"x": torch.full((16,), float(index % 7))}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return {"loss": self.linear(x).square().mean()}

args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=Net(), args=args, train_dataset=Slow()).train()
"""

TOKENS = """
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        ids = torch.arange(index, index + 32) % 60
        return {"input_ids": ids, "labels": ids}

args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
Trainer(model=LlamaForCausalLM(LlamaConfig(**shape)), args=args, train_dataset=Data()).train()
"""

FAULTS = {
    "fails": 'raise ValueError("no such data set: wiki")',
    "never calls the engine": 'print("nothing to do"); sys.exit(0)',
    "exits without a word": "os._exit(3)",
    "hangs": "time.sleep(600)",
}


def script(fault: str = "", *, tunes_itself: bool = False) -> str:
    """The script, with one of ``FAULTS`` in it; or one that calls ``tuned_config``."""
    return TRAIN.replace("FAULT", FAULTS.get(fault, "")).replace("TUNES_ITSELF", str(tunes_itself))


PIPELINE = """
import argparse, json
import deepspeed, torch
from deepspeed.pipe import PipelineModule
from transformers import LlamaConfig

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--local_rank", type=int)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4)
module = PipelineModule.from_transformers(LlamaConfig(**shape), num_stages=args.stages)
data = [{"input_ids": torch.arange(i, i + 32) % 60, "labels": torch.arange(i, i + 32) % 60} for i in range(4000)]
engine, *_ = deepspeed.initialize(args=args, model=module, training_data=data)
for _ in range(1000):
    engine.train_batch()
"""
