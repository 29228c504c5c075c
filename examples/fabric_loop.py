"""Lightning Fabric: one process or several, any of its strategies.

python examples/fabric_loop.py
torchrun --nproc-per-node 2 examples/fabric_loop.py
"""

import os

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

from odb_libra_lightning import ODBLoader
from odb_libra_lightning.data.collators import CausalLMCollator
from odb_libra_lightning.data.source_files import SourceFiles
from odb_libra_lightning.strategies.gloo_exit import destroy_gloo_at_exit

VOCABULARY = 1024


def main() -> None:
    """Train a bigram model on source files."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    fabric = Fabric(devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()  # before the loader's first batch: it asks the process group which share is its own
    destroy_gloo_at_exit()
    fabric.seed_everything(0, verbose=False)

    # Not through `fabric.setup_dataloaders`, which takes a DataLoader and would share its samples out a second time.
    loader = ODBLoader(
        SourceFiles(limit=100, max_length=512, vocab_size=VOCABULARY),
        CausalLMCollator(),
        l_max=4096,
        num_workers=1,
        accumulation=2,
        pin_memory=fabric.device.type == "cuda",
    )
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(64, VOCABULARY))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    for epoch in range(2):  # each pass over the loader is the next epoch
        for batch in loader:
            info = loader.info
            batch = fabric.to_device(batch)
            # A window of micro-batches is `accumulation` long, and shorter at an epoch's end, which the weights know.
            last = info.ends_window
            with fabric.no_backward_sync(model, enabled=not last):
                logits = model(batch["input_ids"])[:, :-1]
                loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())  # a mean, ignores -100
                fabric.backward(loss * info.loss_weight / info.accumulation)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        rank = fabric.global_rank
        print(f"rank {rank}, epoch {epoch}: {info.batch_idx + 1} batches, {info.samples_done} samples, loss {loss:.2f}")

    loader.close()


if __name__ == "__main__":
    main()
