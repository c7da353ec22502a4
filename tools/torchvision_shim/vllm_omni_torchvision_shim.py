# SPDX-License-Identifier: Apache-2.0
"""Let PyPI's torchvision 0.28 be imported beside a CPU build of torch.

PyPI carries only the CUDA build of torchvision. Beside a CPU torch its compiled operators do not
load, torchvision skips them, and its import then fails when it attaches fake kernels to operators
nobody declared ("operator torchvision::nms does not exist"). Its Python side (transforms, resize,
io), which is all that vLLM's and transformers' processors use, needs none of them. Declaring the
schemas first is enough; calling such an operator still fails, as it should.

`tools/setup_env.py` copies this file and its `.pth` into site-packages, and only when torchvision's
`+cpu` build could not be had. The `.pth` is read at every interpreter start, so this module imports
nothing heavy: torch is imported when torchvision is *executed*, not when somebody merely asks
whether it is there (`importlib.util.find_spec`, as transformers does).
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

BOX = "Tensor {0}, Tensor rois, float spatial_scale, "
POOLED = "SymInt pooled_height, SymInt pooled_width"
SHAPE = ", SymInt batch_size, SymInt channels, SymInt height, SymInt width"
DEFORM = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, "
    "SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask"
)
FORWARD_BOX = BOX.format("input") + POOLED
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({FORWARD_BOX}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward({BOX.format('grad')}{POOLED}{SHAPE}, int sampling_ratio, bool aligned)"
    " -> Tensor",
    f"roi_pool({FORWARD_BOX}) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, "
    f"{POOLED}{SHAPE}) -> Tensor",
    f"ps_roi_align({FORWARD_BOX}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, "
    f"float spatial_scale, {POOLED}, int sampling_ratio{SHAPE}) -> Tensor",
    f"ps_roi_pool({FORWARD_BOX}) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, "
    f"float spatial_scale, {POOLED}{SHAPE}) -> Tensor",
    f"deform_conv2d({DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)

_declared: list[object] = []  # a torch.library.Library undoes its declarations when collected


def declare_operators() -> None:
    """Declare torchvision's operators, once, without kernels."""
    if _declared:
        return
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _declared.append(library)


class _Loader(SourceFileLoader):
    def exec_module(self, module) -> None:
        declare_operators()
        super().exec_module(module)


class TorchvisionFinder:
    """A meta-path finder that answers for `torchvision` alone, with the declaring loader."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


if TorchvisionFinder not in sys.meta_path:
    sys.meta_path.insert(0, TorchvisionFinder)
