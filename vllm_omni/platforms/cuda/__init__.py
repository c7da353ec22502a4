# SPDX-License-Identifier: Apache-2.0
"""What is particular to CUDA devices. Imported on such hosts only."""
