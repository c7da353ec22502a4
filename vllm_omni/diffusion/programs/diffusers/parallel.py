# SPDX-License-Identifier: Apache-2.0
"""Denoisers on several devices: which can be, and how each is shared.

Sequences are shared by diffusers' own hooks and attention (Ulysses), which a class has a plan for
(`_cp_plan`). Its `enable_parallelism` is not called, for it divides by the number of accelerators,
of which a host with CPUs alone has none; what it does is done here, on whatever device.

Weights are shared by the class's own plan (`_tp_plan`), or by one below. A layer then holds its
part as a plain tensor. diffusers makes it a `DTensor`, whose dispatch takes the host about as long
as a small layer takes the device, and refuses to do so on a CPU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.hooks.tensor_parallel import TPShardSpec, resolve_tp_shard_specs
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention, MochiAttention
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from vllm_omni.diffusion.ranks.group import TENSOR, Group
from vllm_omni.diffusion.rules import CallRules, Mask, Ragged
from vllm_omni.errors import OmniClientError

COLUMNS, ROWS = "colwise", "rowwise"
"""diffusers' names: a layer's outputs are shared, or its inputs."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a class of denoisers is shared.

    Attributes:
        layers: Its linear layers, by path (`*` for every block): what of each is shared. Empty for
            diffusers' own plan. Those that a checkpoint does not have are passed over.
        heads: Attention modules that count the heads which a rank has.
        norms: RMS norms over all heads together.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


WAN = Sharing(
    layers={
        **{
            f"blocks.*.{attention}.{layer}": style
            for attention in ("attn1", "attn2")
            for layer, style in {
                "to_q": COLUMNS,
                "to_k": COLUMNS,
                "to_v": COLUMNS,
                "add_k_proj": COLUMNS,
                "add_v_proj": COLUMNS,
                "to_out.0": ROWS,
            }.items()
        },
        "blocks.*.ffn.net.0.proj": COLUMNS,
        "blocks.*.ffn.net.2": ROWS,
    },
    heads=("blocks.*.attn1", "blocks.*.attn2"),
    norms=tuple(
        f"blocks.*.{attention}.{norm}"
        for attention in ("attn1", "attn2")
        for norm in ("norm_q", "norm_k", "norm_added_k")
    ),
)

SHARINGS: Mapping[str, Sharing] = {
    "FluxTransformer2DModel": Sharing(),
    "Flux2Transformer2DModel": Sharing(),
    "QwenImageTransformer2DModel": Sharing(),
    "WanTransformer3DModel": WAN,
}
"""By class. Those that are compared with one device in the tests."""


MASKED_RANKS = 2
"""With more ranks in a sequence, diffusers puts the parts of a mask together wrongly: it leaves
padding between those of ranks that have one token less (TemplatedUlyssesAnythingAttention)."""


def share(model: ModelMixin, group: Group) -> None:
    """Leave this rank's part of a denoiser, and have it meet the others' where they must.

    Args:
        model: Changed in place; of a class in `SHARINGS`.
        group: The ranks.
    """
    if group.layout.tensor > 1:
        _share_weights(model, group)
    if group.layout.ulysses > 1:
        _share_sequence(model, group)


def unmasked(rules: CallRules) -> CallRules:
    """The same rules, but that only calls with arguments of equal lengths run together."""
    masks = (Ragged, Mask)
    kept = {n: rule for n, rule in rules.arguments.items() if not isinstance(rule, masks)}
    return replace(rules, arguments=kept, ragged_output=None, beside=None)


def check_weights(model: ModelMixin, size: int) -> None:
    """See that each layer can be shared by so many ranks.

    Args:
        model: Its weights are not looked at, and may be on the meta device.
        size: Number of ranks.

    Raises:
        ValueError: One cannot.
    """
    _specs(model, size)


def _specs(model: ModelMixin, size: int) -> Mapping[str, TPShardSpec]:
    layers = SHARINGS[type(model).__name__].layers
    there = {path: style for path, style in layers.items() if any(_found(model, path))}
    return resolve_tp_shard_specs(model, there or model._tp_plan, size)


def _share_weights(model: ModelMixin, group: Group) -> None:
    mesh = group.mesh[TENSOR]
    rank, size, process_group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    for name, spec in _specs(model, size).items():
        path, _, kind = name.rpartition(".")
        layer = model.get_submodule(path)
        if spec.dim is None:  # a bias that is added once, to the sum
            if rank:
                layer.register_parameter(kind, None)
            continue
        whole = layer.get_parameter(kind)
        blocks = spec.block_sizes or []
        layer.register_parameter(kind, _part(whole, spec.dim, blocks, rank, size))
        if spec.dim == 1:
            layer.register_forward_hook(partial(_summed, process_group))
    sharing = SHARINGS[type(model).__name__]
    for path in sharing.heads:
        for _, attention in _found(model, path):
            attention.heads //= size
    for path in sharing.norms:
        for name, norm in list(_found(model, path)):
            model.set_submodule(name, SharedRMSNorm(norm, rank, size, process_group))


def _part(whole: torch.Tensor, dim: int, blocks: list[int], rank: int, size: int) -> nn.Parameter:
    """A rank's part of each of the blocks that a weight is made of along a dimension."""
    parts = [block.chunk(size, dim)[rank] for block in whole.split(blocks, dim)]
    return nn.Parameter(torch.cat(parts, dim), requires_grad=False)


def _summed(
    group: dist.ProcessGroup, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor
) -> torch.Tensor:
    """A forward hook: every rank's sum over its part of the inputs becomes that over all."""
    dist.all_reduce(output, group=group)
    return output


class SharedRMSNorm(nn.Module):
    """An RMS norm whose inputs the ranks hold a part of each.

    Args:
        whole: The norm of all of it.
        rank: In the group.
        size: Of the group.
        group: The ranks.
    """

    def __init__(self, whole: nn.RMSNorm, rank: int, size: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        (self._width,) = whole.normalized_shape
        self._eps = whole.eps
        self._group = group
        self.weight = _part(whole.weight, 0, [self._width], rank, size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., part] -> [..., part], by the root mean square of all parts."""
        precise = hidden.float()
        total = precise.square().sum(-1, keepdim=True)
        dist.all_reduce(total, group=self._group)
        eps = torch.finfo(hidden.dtype).eps if self._eps is None else self._eps
        return (precise * (total / self._width + eps).rsqrt()).type_as(hidden) * self.weight


def _share_sequence(model: ModelMixin, group: Group) -> None:
    """Have diffusers split sequences of any length at the entrance and gather them at the exit."""
    sequence = ContextParallelConfig(
        ulysses_degree=group.layout.ulysses, ulysses_anything=True, mesh=group.mesh
    )
    config = ParallelConfig(context_parallel_config=sequence)
    world_size = group.layout.world_size
    config.setup(group.rank, world_size, group.device, mesh=group.mesh)
    for module in model.modules():
        if isinstance(module, Attention | MochiAttention | AttentionModuleMixin):
            module.processor._parallel_config = config
    apply_context_parallel(model, sequence, model._cp_plan)
    if group.layout.ulysses > MASKED_RANKS:
        model.register_forward_pre_hook(_refuse_mask, with_kwargs=True)


def _refuse_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward hook: no result is better than a wrong one."""
    if any(name.endswith("_mask") and value is not None for name, value in kwargs.items()):
        raise OmniClientError(
            f"prompts of different lengths in one call: not where more than {MASKED_RANKS} devices "
            "share a sequence"
        )


def _found(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a path, with the names that they have: `*` stands for every block."""
    return ((n, module) for n, module in model.named_modules() if fnmatchcase(n, path))
