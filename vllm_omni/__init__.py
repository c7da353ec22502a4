# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni: serving for models that take and make any mix of text, image, audio and video."""
