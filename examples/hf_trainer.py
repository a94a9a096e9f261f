"""Hugging Face's `Trainer` on several devices: a tiny GPT-2 learns the bytes of Python's library, without a download.

    python examples/hf_trainer.py --batch-size 16
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --batch-size 8

Both end with the same parameters up to rounding: two times 8 blocks are 16. It needs `pip install
'elche[transformers]'`; `hf_loop.py` trains the same model in its own loop.
"""

import argparse
import hashlib
import json
import tempfile

import torch
from hf_loop import MODULES, Blocks, build_model
from transformers import PrinterCallback, Trainer, TrainingArguments

from elche_worker.integrations.transformers import ElcheCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--blocks", type=int, help="how many blocks of text to train, by default all")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--optimizer", default="adamw_torch")
    parser.add_argument("--save", help="file for the parameters")
    options = parser.parse_args()

    elche = ElcheCallback()  # before TrainingArguments
    torch.manual_seed(0)
    model = build_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=options.batch_size, num_train_epochs=1, save_strategy="no",
            learning_rate=options.learning_rate, optim=options.optimizer, report_to="none", disable_tqdm=True,
            train_sampling_strategy="sequential",  # as the parts are consecutive, two processes make one's batches
        )  # fmt: skip
        train_set = elche.part(Blocks(*MODULES, limit=options.blocks))
        trainer = Trainer(model, arguments, train_dataset=train_set, callbacks=[elche])
        trainer.remove_callback(PrinterCallback)
        output = trainer.train()

    values = torch.cat([one.detach().cpu().reshape(-1) for one in model.parameters()])
    result = {"rank": elche.rank, "ranks": elche.world_size, "steps": output.global_step, "loss": output.training_loss}
    print(json.dumps({**result, "digest": hashlib.sha256(values.numpy()).hexdigest()[:16]}), flush=True)
    if options.save and elche.rank == 0:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
