# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve --omni`: vLLM's benchmark of a server, for sounds, pictures and videos too."""
