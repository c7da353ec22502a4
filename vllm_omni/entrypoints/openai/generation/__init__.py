# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos and sounds over HTTP: what is between the routes and a diffusion pipeline."""
