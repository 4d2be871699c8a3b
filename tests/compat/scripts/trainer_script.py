"""An ordinary Trainer script, as a user writes it: it knows nothing of DeepSpeed or ds_hf beyond TrainingArguments."""

import json
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "folder of a model"})
    report: str = field(metadata={"help": "JSON file for the history of the run"})
    from_scratch: bool = field(default=False, metadata={"help": "build from the config instead of loading weights"})
    evaluate_only: bool = False


class Sentences(torch.utils.data.Dataset):
    """Counting sequences with a start and a stride each; some labels are masked, so that token counts differ."""

    def __init__(self, count: int, seed: int, vocab: int = 128, length: int = 16):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(0, vocab, (count, 1), generator=generator)
        stride = torch.randint(1, 4, (count, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(length)) % vocab
        self.masked = torch.randint(1, length // 2, (count,), generator=generator).tolist()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[: self.masked[index]] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def main():
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(script.model_name_or_path))
    else:
        model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    trainer = Trainer(model=model, args=args, train_dataset=Sentences(60, seed=1), eval_dataset=Sentences(12, seed=2))
    if not script.evaluate_only:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    final = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open(script.report, "w") as file:
            report = {"history": trainer.state.log_history, "final": final, "best": trainer.state.best_model_checkpoint}
            report["world_size"] = args.world_size
            json.dump(report, file)


if __name__ == "__main__":
    main()
