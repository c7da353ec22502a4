# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-3: a language model that writes a picture's prompt and shape, then paints it."""
