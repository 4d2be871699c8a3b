"""Training as DeepSpeed's getting-started page of 2020 shows it, filled in where the page leaves gaps."""

import argparse
import json

import deepspeed
import torch


def add_arguments():
    parser = argparse.ArgumentParser(description="My training script.")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser.add_argument("--save_dir", type=str)
    parser.add_argument("--save_interval", type=int, default=2)
    parser.add_argument("--load_dir", type=str)
    parser.add_argument("--ckpt_id", type=str)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--report", type=str)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 1)

    def forward(self, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.second(torch.tanh(self.first(inputs))).squeeze(-1), targets)


def make_loader(count, micro_batch, rank, world_size):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, world_size * micro_batch, 8, generator=generator)
    mine = inputs[:, rank * micro_batch : (rank + 1) * micro_batch]
    return [(batch, batch.sum(-1).sin()) for batch in mine]


def dataloader_to_step(data_loader, step):
    del data_loader[:step]


def main():
    args = add_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(7)
    model = Model()
    params = [p for p in model.parameters() if p.requires_grad]
    model_engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=params)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data_loader = make_loader(args.steps, model_engine.train_micro_batch_size_per_gpu(), rank, world_size)
    first, client_sd, history, tags = 0, {}, [], []

    if args.load_dir:
        # load checkpoint
        _, client_sd = model_engine.load_checkpoint(args.load_dir, args.ckpt_id)
        step = client_sd["step"]

        # advance data loader to ckpt step
        dataloader_to_step(data_loader, step + 1)
        first = step + 1

    for step, batch in enumerate(data_loader, start=first):
        batch = [tensor.to(model_engine.device) for tensor in batch]

        # forward() method
        loss = model_engine(batch)

        # runs backpropagation
        model_engine.backward(loss)

        # weight update
        model_engine.step()

        history.append(loss.item())

        # save checkpoint
        if args.save_dir and step % args.save_interval:
            client_sd["step"] = step
            ckpt_id = loss.item()
            model_engine.save_checkpoint(args.save_dir, ckpt_id, client_sd=client_sd)
            tags.append(str(ckpt_id))

    if rank == 0:
        with open(args.report, "w") as file:
            json.dump({"losses": history, "tags": tags, "optimizer": type(optimizer).__name__}, file)


if __name__ == "__main__":
    main()
