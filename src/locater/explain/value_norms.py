"""Attention weighted by the size of what it carries."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.explain.attention_flow import Inputs, StackMaps, explained, read_only_where, sequence_of
from locater.explain.attention_record import AttentionEvent
from locater.explain.explanation import Explanation
from locater.explain.streams import StreamsOf
from locater.explain.targets import TargetChoice
from locater.observing.accumulators import wide
from locater.observing.map_of_heads import attention_maps


@torch.inference_mode(False)
def attention_norms(
    model: nn.Module, inputs: Inputs, target: TargetChoice = None, *, streams: StreamsOf | None = None
) -> Explanation:
    """|| sum over heads of A_ij v_j W_O || in the last layer: the size of what token i takes from token j (Kobayashi et
    al. 2020). For another stream, the same of the last cross-attention.
    """
    run, chosen, steps, slopes = read_only_where(model, inputs, target, streams)
    run.check_values("attention_norms")
    last = {(step.reader, step.read): step for step in steps}
    maps = {pair: carried_norms(step.event, sequence_of(step, chosen)) for pair, step in last.items()}
    exact = "norms of the vectors that attention adds in one layer; what later maps and norms do is left out"
    return explained("attention_norms", run, chosen, steps, slopes, StackMaps(maps), exact)


def carried_norms(event: AttentionEvent, row: int = 0) -> Float[Tensor, "T S"]:
    """|| sum_h A_hij v_hj W_O,h || for all pairs of tokens, from the Gram matrices of the heads at each key: an array
    (T, S, d) is not needed.
    """
    layer, values = event.layer, event.value
    if layer.out is None or values is None:
        raise LocaterError(
            f"{layer.name}: its output map is not known, so it has no attention_norms: use raw_attention"
        )
    if layer.mixed_norm is not None or layer.gate is not None:
        raise LocaterError(f"{layer.name}: a norm or a gate is in front of its output map: use raw_attention")
    H = layer.heads
    with torch.no_grad():
        v = values[row].to(wide(values.device)).repeat_interleave(H // values.shape[1], 0)  # (H, S, V)
        W_O = layer.out.weight().detach().to(v).unflatten(1, (H, -1))  # (d, H, V)
        carried = torch.einsum("hsv,dhv->shd", v, W_O)
        gram = carried @ carried.mT  # (S, H, H)
        A = attention_maps(event.call)[row].to(v)  # (H, T, S)
        squared = sum(A[h] * torch.einsum("gts,sg->ts", A, gram[:, h]) for h in range(H))
        assert isinstance(squared, Tensor)
        return squared.clamp_min(0).sqrt().to(torch.promote_types(values.dtype, torch.float32))
