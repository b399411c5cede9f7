"""One table of tolerances by dtype, and the comparison that uses it."""

import torch
from torch import Tensor

# The largest difference allowed, as a share of the largest expected magnitude.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-10,  # eps 2.2e-16: leaves 1e5 roundings, far below what a wrong term or factor would do
    torch.float32: 2e-5,  # eps 1.2e-7: sums of a few hundred products, in another order than the reference
    torch.bfloat16: 2e-2,  # eps 7.8e-3: two or three roundings between the stages; sums are in fp32
    torch.float16: 4e-3,  # eps 9.8e-4: the same roundings as bfloat16 at eight times its precision
}


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of a dtype; 0 (exact) for integers and bools."""
    if dtype in TOLERANCES:
        return TOLERANCES[dtype]
    if dtype.is_floating_point or dtype.is_complex:
        raise ValueError(
            f"dtype ({dtype}) has no tolerance; it must be one of {list(TOLERANCES)} or an integer or bool."
        )
    return 0.0


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, what: str = "") -> None:
    """Fail unless two tensors agree to the tolerance of a dtype.

    The comparison is made in fp64 on the CPU: max |actual - expected| <= tolerance * max |expected|. An expected
    tensor that is zero everywhere, and integers and bools, must be met exactly. Anything not finite fails.

    Args:
        actual: the result under test, any shape, dtype and device.
        expected: the reference, the same shape; its dtype may be wider.
        dtype: whose tolerance counts; that of `actual` if not given.
        what: the name of the tensor, for the message.
    """
    __tracebackhide__ = True
    name = what or "tensor"
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}.")
    allowed = tolerance(dtype or actual.dtype)
    actual = actual.detach().to("cpu", torch.float64)
    expected = expected.detach().to("cpu", torch.float64)
    for side, values in (("actual", actual), ("expected", expected)):
        if not torch.isfinite(values).all():
            index = tuple(torch.nonzero(~torch.isfinite(values))[0].tolist())
            raise AssertionError(f"{name}: the {side} value at {index} is {values[index].item()}.")
    if actual.numel() == 0:
        return
    difference = (actual - expected).abs()
    scale = expected.abs().max().item()
    if difference.max().item() > allowed * scale:
        index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
        raise AssertionError(
            f"{name}: at {index} actual {actual[index].item():.17g}, expected {expected[index].item():.17g}; "
            f"difference {difference[index].item():.3g} > {allowed:g} x max |expected| {scale:.3g} "
            f"({int((difference > allowed * scale).sum())} of {difference.numel()} elements)."
        )


# The largest relative error of rounding one value to nearest, 2^-(mantissa bits + 1).
UNIT_ROUNDOFF = {"E4M3": 2.0**-4, "E5M2": 2.0**-3, "E2M1": 2.0**-2}


def quantized_bounds(recipe: str, fp8: str) -> dict[str, float]:
    """Return the bounds of the relative errors |actual - exact| / |exact| (Frobenius) of quantized experts.

    A value x is rounded with an error spread evenly over at most +-u |x|: root mean square u |x| / sqrt(3), or with
    stochastic rounding (up or down over a gap of 2 u |x|) at most 2 u |x| / sqrt(6). Errors of different values are
    independent, so a product of two quantized matrices, summed over many terms, has the root of the sum of squares:
    e(a b)^2 = e(a)^2 + e(b)^2. SwiGLU passes an error e of gate and up on as at most sqrt(1.28^2 + 1) e (the slope of
    silu is at most 1.28 times silu(x) / x for x > 0, and the rest is small); so do its gradients, with the error of the
    incoming gradient added. A bound is that, as it stands: what really arises is smaller because most values lie above
    the bottom of their binade.

    Args:
        recipe: its name.
        fp8: "hybrid" or "e4m3".

    Returns:
        The bound for output, tokens, probs and the weights by name.
    """
    is_fp4 = recipe == "nvfp4"
    forward = UNIT_ROUNDOFF["E2M1" if is_fp4 else "E4M3"] / 3**0.5
    backward = 2 * forward / 2**0.5 if is_fp4 else UNIT_ROUNDOFF["E5M2" if fp8 == "hybrid" else "E4M3"] / 3**0.5
    through_activation = (1.28**2 + 1) ** 0.5

    def root(*errors: float) -> float:
        return sum(error**2 for error in errors) ** 0.5

    first = root(forward, forward)
    hidden = through_activation * first
    dh = root(backward, forward)
    dfirst = root(dh, through_activation * first)
    dx = root(dfirst, backward, forward)
    return {
        "output": root(hidden, forward, forward),
        "tokens": dx,
        "probs": root(dh, hidden),
        "linear_fc1.weight": dx,
        "linear_fc2.weight": root(hidden, forward, backward),
    }
