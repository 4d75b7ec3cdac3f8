"""A training step as a CUDA graph, for models so small that their steps are nothing but launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM = 3  # steps that capturing needs before it


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """`step`, taken a few times and captured; what is returned replays it. Tensors that it reads and writes stay where
    they are.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def again(held: object = step) -> None:  # what a graph reads and writes has to stay alive
        graph.replay()

    return again
