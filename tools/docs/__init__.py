# SPDX-License-Identifier: Apache-2.0
"""Pages of `docs/` that are written from the code, so that they cannot say anything else."""
