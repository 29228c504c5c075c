"""A training loop without a trainer: one process, or DDP by hand over several.

python examples/raw_loop.py
torchrun --nproc-per-node 2 examples/raw_loop.py
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from odb_libra_lightning import ODBLoader
from odb_libra_lightning.data.collators import CausalLMCollator
from odb_libra_lightning.data.source_files import SourceFiles

VOCABULARY = 1024


def main() -> None:
    """Train a bigram model on source files."""
    distributed = "WORLD_SIZE" in os.environ  # set by torchrun
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if distributed:  # before the loader's first batch: it asks the process group which share is its own
        dist.init_process_group("nccl" if on_gpu else "gloo")

    dataset = SourceFiles(limit=100, max_length=512, vocab_size=VOCABULARY)
    loader = ODBLoader(dataset, CausalLMCollator(), l_max=4096, num_workers=1, accumulation=2, pin_memory=on_gpu)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(64, VOCABULARY)).to(device)
    parallel = DistributedDataParallel(model) if distributed else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(2):  # each pass over the loader is the next epoch
        for batch in loader:
            info = loader.info
            tokens, labels = (batch[key].to(device, non_blocking=True) for key in ("input_ids", "labels"))
            # A window of micro-batches is `accumulation` long, and shorter at an epoch's end, which the weights know.
            last = info.ends_window
            with parallel.no_sync() if parallel and not last else nullcontext():
                logits = (parallel or model)(tokens)[:, :-1]
                loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())  # a mean, ignores -100
                (loss * info.loss_weight / info.accumulation).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        rank = dist.get_rank() if distributed else 0
        print(f"rank {rank}, epoch {epoch}: {info.batch_idx + 1} batches, {info.samples_done} samples, loss {loss:.2f}")

    loader.close()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
