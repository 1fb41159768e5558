"""Check on a caller's own call that the function in place of a module computes what the module computes."""

from varlen_graphs.errors import SpecError
from varlen_graphs.graphs.forward import MODULE, Forward
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import flatten
from varlen_graphs.spec.reading import read_layout
from varlen_graphs.verify.compare import Expected, few, limit_of
from varlen_graphs.verify.trial import Example
from varlen_graphs.verify.wrong_buffers import wrong_buffers


def check_claim(forward: Forward, tolerance: float | None, call: Call, own: object) -> None:
    """Check that the declared forward, run eager, returns what the module itself returned for a call. Syncs.

    A module that draws random numbers, or a declared forward that cannot run this call, shows nothing.

    Raises:
        SpecError: It returns something else. Only the caller knows which of the two is right.
    """
    layout, limit = read_layout(forward.spec, call), limit_of(tolerance, forward, call.rows.device)
    expected = Expected(own, layout, call.padded)
    try:
        output = flatten(forward.exact(call), forward.spec.declared)
    except SpecError:
        raise
    except Exception:  # of the caller's own code, for a call that the module itself takes
        return
    found = expected.furthest(output, layout, range(len(layout)), call.padded)
    example = Example(call, layout, expected, MODULE, output, False, False)
    if found.error <= limit or found.error <= example.allowed(forward, limit, output):
        return
    if Expected(forward.answer(call), layout, call.padded).differs_from(expected, output) > limit:
        return  # the module draws random numbers
    name = f"{type(forward.module).__name__}.{forward.method}"
    named = "".join(f"\n{wrong}" for wrong in [wrong_buffers(forward, call, expected, limit)] if wrong)
    raise SpecError(
        f"forward={getattr(forward.function, '__qualname__', forward.function)!r} computes something other than "
        f"{name}, in whose place it runs: {found.where} differs by {found.error:.1e} (tolerance {limit:.0e}), in a "
        f"call of items {few(layout)}. Expected the same outputs.{named}\nIf it is to compute what another method of "
        "the module does, name that one: GraphedEncoder(..., method='forward_features') runs it, and graphs are proven "
        "against it. If the module itself is right, add declared_by='recipe' to the declaration; if nothing in the "
        "module computes this, verify=vg.Verify(prove=False)"
    )
