# SPDX-License-Identifier: Apache-2.0
"""Drawing a frame by denoising it, with classifier-free guidance, for a batch of requests."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

from vllm_omni.errors import OmniConfigError

Predict = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Noisy latents [n, width], timesteps [n] and conditions [n, hidden_size] -> [n, width]."""
_SCHEDULER = "DPMSolverMultistepScheduler"
_SCHEDULER_CONFIG = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}
_STEPS = 10


class GuidedDenoising:
    """diffusers' multistep solver over a small network, as a generation config describes it.

    The solver's numbers stay on the CPU, and its times are known beforehand: a step waits for
    nothing.

    Args:
        settings: The checkpoint's generation config.

    Raises:
        OmniConfigError: It names another solver.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        name = settings.get("noise_scheduler_class", _SCHEDULER)
        if name != _SCHEDULER:
            raise OmniConfigError(
                f"generation_config.json: noise_scheduler_class = {name!r}: only {_SCHEDULER!r}"
            )
        self._steps = int(settings.get("num_diffusion_steps") or _STEPS)
        self._guidance = float(settings.get("guidance_scale") or 1.0)
        with torch.device("cpu"):
            self._solver = DPMSolverMultistepScheduler(
                **settings.get("noise_scheduler_config", _SCHEDULER_CONFIG)
            )

    def __call__(
        self,
        predict: Predict,
        condition: torch.Tensor,
        negative: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        """The latents that noise becomes.

        Args:
            predict: The network.
            condition: [b, hidden_size].
            negative: [b, hidden_size]; what guidance leads away from.
            noise: [b, width].

        Returns:
            [b, width], in memory of its own (row A-70).
        """
        conditions = torch.cat([condition, negative])
        self._solver.set_timesteps(num_inference_steps=self._steps)
        times = self._solver.timesteps.to(noise.device, noise.dtype, non_blocking=True)
        latents = noise
        for index, time in enumerate(self._solver.timesteps):
            predicted = predict(
                torch.cat([latents, latents]), times[index].expand(len(conditions)), conditions
            )
            wanted, unwanted = predicted.chunk(2)
            guided = unwanted + self._guidance * (wanted - unwanted)
            latents = self._solver.step(guided, time, latents).prev_sample
        return latents
