# SPDX-License-Identifier: Apache-2.0
"""The AR engine on vLLM's Model Runner V2. Imported on CUDA hosts only."""
