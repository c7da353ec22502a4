# SPDX-License-Identifier: Apache-2.0
"""Any diffusers pipeline as a program.

A request runs the stock `__call__` of the checkpoint's pipeline class on a private copy of the
pipeline object, whose models are proxies (`vllm_omni.diffusion.proxy`) and whose schedulers are its
own. So nothing has to be written for a model to be served. What may be written, in `rules`, is how
the calls of one of its models are put together in one forward.

- `load`: the checkpoint's components
- `kit`: the pipeline classes that they make, and which of them a request needs
- `arguments`: what a request says -> arguments of `__call__`
- `watch`: steps of a scheduler -> progress, trajectory
- `results`: what `__call__` returns -> tensors to send
- `rules`: per model class, how calls batch
- `spread`, `parallel`: denoisers on several devices
- `run`: all of it in order
"""

from vllm_omni.diffusion.programs.diffusers.load import load as _load
from vllm_omni.diffusion.programs.diffusers.run import run as _run
from vllm_omni.diffusion.programs.diffusers.spread import check as _check
from vllm_omni.diffusion.programs.diffusers.spread import load as _load_part
from vllm_omni.diffusion.spec import ProgramSpec, SpreadProgram

_SPREAD = SpreadProgram(_check, _load_part)

image = ProgramSpec("diffusion", _run, _load, "image", spread=_SPREAD)
video = ProgramSpec("diffusion", _run, _load, "video", spread=_SPREAD)
audio = ProgramSpec("diffusion", _run, _load, "audio", spread=_SPREAD)
