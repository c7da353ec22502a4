# SPDX-License-Identifier: Apache-2.0
"""What is particular to CUDA devices. `model_state` can be imported on such hosts only."""
