# SPDX-License-Identifier: Apache-2.0
"""One replica on several devices: a process for each, which together run a component's forwards.

Rank 0 is the replica's process as it is with one device: programs, scheduler, connectors, text
encoders and decoders are there. The others hold the denoisers alone, or their part of them. For
each forward rank 0 sends them one message through a pipe, the same for all, and its tensors through
the process group. A rank with nothing to do waits at its pipe, in no collective, so that it may
wait for as long as there is no request.

- `layout`: how ranks share the work
- `group`: torch's process groups, and tensors through them
- `messages`: what goes through the pipes
- `ranks`: rank 0's side
- `process`: a further rank
- `watch`: the end of one is the end of all
"""
