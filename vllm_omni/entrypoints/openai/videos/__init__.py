# SPDX-License-Identifier: Apache-2.0
"""Videos that are made in the background: what is known of each, where it lies, who makes it."""
