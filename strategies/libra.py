"""Context-parallel training with balanced attention, as one argument of a Trainer.

A pack that a replica's loader gives out is cut over the replica's processes, its attention is computed wherever the
pool has room, and the gradient is that of the mean over the whole pack: the module, its optimizer, precision,
accumulation and checkpoints are those of an ordinary run. Source: Libra (arXiv:2607.23250), section 4.
"""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from types import MethodType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler
from typing_extensions import override

from odb_libra_lightning.libra.active_attention import activate, deactivate
from odb_libra_lightning.libra.attention import Remember
from odb_libra_lightning.libra.kernel_interface import AttentionKernel
from odb_libra_lightning.libra.layout import Placement
from odb_libra_lightning.libra.process_groups import RankLayout
from odb_libra_lightning.odb.errors import refusing_setup
from odb_libra_lightning.odb.training_loader import TrainingLoader
from odb_libra_lightning.strategies import huggingface
from odb_libra_lightning.strategies.deepspeed import ODBDeepSpeedStrategy
from odb_libra_lightning.strategies.gloo_exit import destroy_gloo_at_exit
from odb_libra_lightning.strategies.gradient_scaling import scale_gradient
from odb_libra_lightning.strategies.libra_options import AttentionName, LibraOptions
from odb_libra_lightning.strategies.pool_session import PoolSession
from odb_libra_lightning.strategies.sharded_blocks import shard_blocks
from odb_libra_lightning.strategies.unlabeled_rows import kept_out_of_epochs


class ContextParallelStrategy(ParallelStrategy):
    """What the strategies of this file have in common; each adds it to one of Lightning's.

    Args:
        context_parallel: processes that share a packed sequence, `CP`. Ranks of a replica follow one another.
        pool_size: replicas among which attention work is evened out, `P`. None: the largest number up to 8 that
            divides the replicas; for `distca` all of them.
        block_size: rows of a tile at the most, `B`. None: 2048.
        head_shards: shards of the query heads, `H`. None: the largest number up to 4 that divides the KV heads.
        chunks: slices of a tile's heads that are transferred and computed in turn, `M`. None: up to 4.
        attention: `libra`; or one that it is compared with: `ulysses`, `ring`, or `distca`.
        placement: which worker computes a tile: `home_first` or `paper`.
        sequence_placement: which pool a packed sequence of `PackedDataModule` goes to: `vrsp`, or another of
            `libra.sequence_placement.PLACEMENTS`.
        refine: even out the pools further by swaps.
        tau: share of the mean load by which a worker may exceed it.
        kernel: name of an attention kernel, or a kernel. None: the best of the device.
        remember: what backward does for rows of other workers, `keep` or `refetch`; see `libra_attention`.
        causal_shift: whether the module's loss shifts `labels` by one, as language models do.
        ignore_index: label that bears no loss.
        pool_timeout: seconds that processes of a pool wait for one another.
        **strategy: arguments of the Lightning strategy.

    Raises:
        ValueError: options that cannot work; at set-up, options that do not fit the number of processes or the model.

    Every batch is one packed sequence (`libra.packs.read_pack`). `training_step` returns the mean over the batch's
    labels, as it does anywhere. Validation and tests attend within each replica.
    """

    def __init__(
        self,
        *,
        context_parallel: int = 1,
        pool_size: int | None = None,
        block_size: int | None = None,
        head_shards: int | None = None,
        chunks: int | None = None,
        attention: AttentionName = "libra",
        placement: Placement = "home_first",
        sequence_placement: str = "vrsp",
        refine: bool = True,
        tau: float = 0.03,
        kernel: str | AttentionKernel | None = None,
        remember: Remember = "keep",
        causal_shift: bool = True,
        ignore_index: int = -100,
        pool_timeout: float = 1800.0,
        **strategy: Any,
    ) -> None:
        self.options = LibraOptions(
            context_parallel=context_parallel,
            pool_size=pool_size,
            block_size=block_size,
            head_shards=head_shards,
            chunks=chunks,
            attention=attention,
            placement=placement,
            sequence_placement=sequence_placement,
            refine=refine,
            tau=tau,
            kernel=kernel,
            remember=remember,
            causal_shift=causal_shift,
            ignore_index=ignore_index,
            pool_timeout=pool_timeout,
        )
        known = [field.name for field in fields(LibraOptions)]
        for name in strategy:
            if near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                raise TypeError(f"{type(self).__name__} has no option {name!r}, did you mean {near[0]!r}?")
        super().__init__(**strategy)
        self.session: PoolSession | None = None  # the run's pools at work; None outside a run
        self._installed: huggingface.Installed | None = None
        self._hooked: list[TrainingLoader] = []
        self._failed = False

    @property
    def rank_layout(self) -> RankLayout:
        """Pools and replicas of the run.

        Raises:
            ValueError: options that do not fit the number of processes.
        """
        world_size = self.num_nodes * self.num_processes  # type: ignore[attr-defined]  # each of Lightning's has them
        return self.options.rank_layout(world_size)

    def check(self, module: nn.Module) -> None:
        """Make sure that the options fit the processes and the heads of a module's models; nothing is changed.

        Raises:
            SetupError: they do not; the sentence says what would fit.
        """
        with refusing_setup():
            assert self.rank_layout
            for heads in huggingface.attention_heads(module):
                self.options.pool_layout(
                    num_heads=heads.num_heads,
                    num_kv_heads=heads.num_kv_heads,
                    head_dim=heads.head_dim,
                    bytes_per_element=2,  # of no account here
                    window=heads.window,
                )

    def _running_session(self) -> PoolSession:
        if self.session is None:
            raise RuntimeError(f"{type(self).__name__} has no pools before its set-up, nor after its end")
        return self.session

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        layout = self.rank_layout
        return {"num_replicas": layout.num_replicas, "rank": layout.replica_of(self.global_rank)}

    @override
    def setup_environment(self) -> None:
        with refusing_setup():
            layout = self.rank_layout
        super().setup_environment()
        destroy_gloo_at_exit()
        self._failed = False
        self.session = PoolSession(options=self.options, layout=layout, rank=self.global_rank, device=self.root_device)
        activate(self.session)
        rank_zero_info(
            f"{type(self).__name__}: {layout.num_replicas} replicas of {layout.context_parallel} processes, in "
            f"{layout.num_pools} pools of {layout.pool_size}; attention by {self.options.attention}"
        )

    @override
    def setup(self, trainer: L.Trainer) -> None:
        assert self.lightning_module is not None
        with refusing_setup():
            training = trainer.state.fn == TrainerFn.FITTING
            self._installed = huggingface.install(self.lightning_module, training=training)
        self.check(self.lightning_module)
        super().setup(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        self._check_replicas(loader)
        if isinstance(loader, TrainingLoader):
            loader.on_pass, loader.on_batch = self._begin_pass, self._announce
            self._hooked.append(loader)
        return loader

    def _check_replicas(self, loader: object) -> None:
        """Refuse a loader that takes each process for a replica: parts of its packs would be trained on by nobody."""
        layout = self.rank_layout
        expected = (layout.replica_of(self.global_rank), layout.num_replicas)
        if isinstance(loader, TrainingLoader):
            if loader.ranks != expected or loader.replica_size != layout.context_parallel:
                raise ValueError(
                    f"rank {self.global_rank}: the {type(loader).__name__} loads as rank {loader.ranks[0]} of "
                    f"{loader.ranks[1]} with replica_size={loader.replica_size}: give it rank={expected[0]}, "
                    f"world_size={expected[1]} and replica_size={layout.context_parallel}, or its data to a datamodule "
                    "of odb_libra_lightning"
                )
            return
        samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
        for sampler in samplers:
            if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != expected:
                raise ValueError(
                    f"rank {self.global_rank}: the DataLoader's DistributedSampler is rank {sampler.rank} of "
                    f"{sampler.num_replicas}: give it rank={expected[0]} and num_replicas={expected[1]}, or leave the "
                    "sampler to the Trainer"
                )

    def _begin_pass(self) -> None:
        if self._trains():
            self._running_session().begin_pass()

    def _announce(self, batch: Any) -> None:
        if self._trains():
            self._running_session().announce(batch)

    def _trains(self) -> bool:
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer.training)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self.lightning_module is not None
        training = self._trains()
        trainer = self.lightning_module.trainer
        # A hook that has seen the batch may have changed it, in each process otherwise.
        changed = any(
            is_overridden("on_before_batch_transfer", hooks)
            for hooks in (self.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
            if hooks is not None
        )
        shared = training and isinstance(trainer.train_dataloader, TrainingLoader) and not changed
        session = self._running_session()
        shard = session.take(batch, training=training, shared=shared)
        moved = super().batch_to_device(shard, device, dataloader_idx)
        session.position_ids = moved["position_ids"]
        return moved

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._logs_of_the_shard():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._logs_of_the_shard():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._logs_of_the_shard():
            return super().test_step(*args, **kwargs)

    def _logs_of_the_shard(self) -> AbstractContextManager[None]:
        assert self.lightning_module is not None
        labeled = self._running_session().loss_share > 0
        return nullcontext() if labeled else kept_out_of_epochs(self.lightning_module.trainer)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        session = self._running_session()
        if not session.attended:
            raise RuntimeError(
                f"rank {self.global_rank}: the model computed its loss without core_attention, so its rows attend to "
                "those of this process alone, or to none: call odb_libra_lightning.libra.core_attention in it, or "
                "train a Hugging Face model of the attention interface"
            )
        hooks = scale_gradient(closure_loss, session.loss_share) if closure_loss.requires_grad else []
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._installed is not None:
            self._installed.restore()
            self._installed = None
        for loader in self._hooked:
            loader.on_pass = loader.on_batch = None
        self._hooked.clear()
        if self.session is not None:
            deactivate(self.session)
            self.session.close(failed=self._failed)
            self.session = None
        super().teardown()


class LibraStrategy(ContextParallelStrategy, DDPStrategy):
    """Lightning's `DDPStrategy` with context parallelism and balanced attention.

    Example:
        >>> L.Trainer(strategy=LibraStrategy(context_parallel=4, pool_size=8), devices=8, num_nodes=4)  # doctest: +SKIP
    """


class LibraFSDPStrategy(ContextParallelStrategy, ModelParallelStrategy):
    """FSDP2 over all processes, with context parallelism and balanced attention.

    A module that has no `configure_model` is sharded here, by transformer blocks (`sharded_blocks.shard_blocks`). One
    that has shards itself, over `self.device_mesh["data_parallel"]`, which is all processes.

    Example:
        >>> L.Trainer(strategy=LibraFSDPStrategy(context_parallel=8), devices=8)  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if name in options:
                raise TypeError(f"{name} is not to be set: parameters are sharded over all processes of the run")
        super().__init__(**options, data_parallel_size="auto", tensor_parallel_size=1)
        self._shards_module = False

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        self._data_parallel_size = self.num_nodes * self.num_processes
        if not is_overridden("configure_model", self.lightning_module):
            self.lightning_module.configure_model = MethodType(shard_blocks, self.lightning_module)  # type: ignore[method-assign]
            self._shards_module = True
        super().setup_environment()

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._shards_module and self.lightning_module is not None:
            del self.lightning_module.configure_model
            self._shards_module = False


class LibraDeepSpeedStrategy(ContextParallelStrategy, ODBDeepSpeedStrategy):
    """DeepSpeed's ZeRO over all processes, with context parallelism and balanced attention.

    It is `ODBDeepSpeedStrategy` otherwise, whose arguments it takes.

    Example:
        >>> L.Trainer(strategy=LibraDeepSpeedStrategy(context_parallel=8, stage=3), devices=8)  # doctest: +SKIP
    """


def register_strategies() -> None:
    """Register the strategies with Lightning by name: `Trainer(strategy="libra_ddp")`."""
    for name, strategy, what in (
        ("libra_ddp", LibraStrategy, "DDP"),
        ("libra_fsdp2", LibraFSDPStrategy, "FSDP2"),
        ("libra_deepspeed", LibraDeepSpeedStrategy, "DeepSpeed ZeRO"),
    ):
        StrategyRegistry.register(
            name, strategy, description=f"{what} with context-parallel attention balanced over pools", override=True
        )
