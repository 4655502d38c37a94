"""The fused head on one GPU beside the products it cannot avoid, and beside peers where they are installed.

    python -m tests.benchmarks.against_products [--shapes 8192,4096,131072 ...] [--peers] [--json FILE]

Times are taken in turn (tests/benchmarks/timing.py), ratios are of medians. Errors are those of the first 256
rows against fp64. Memory is what is allocated at the peak beyond inputs, outputs and gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcore_entropy as me
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.statistics import Wanted
from tests.benchmarks.timing import interleaved

SHAPES = (
    (4096, 4096, 131072),
    (8192, 4096, 131072),
    (8192, 3584, 152064),
    (32768, 2048, 151936),
    (16384, 896, 151936),
    (8192, 2304, 256000),
)
ROUNDS = 6
CHECKED_ROWS = 256


@dataclass
class Case:
    """Inputs of one shape and what they give in fp64, for the first rows."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    upstream: tuple[Tensor, Tensor]
    truth: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def make(tokens: int, hidden_size: int, vocab: int) -> Case:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, hidden_size, device="cuda").bfloat16().requires_grad_()
        weight = torch.randn(vocab, hidden_size, device="cuda") * 2.0 * hidden_size**-0.5
        weight = weight.bfloat16().requires_grad_()
        target = torch.randint(0, vocab, (tokens,), device="cuda")
        upstream = torch.randn(tokens, device="cuda"), torch.randn(tokens, device="cuda") * 0.01
        case = Case(hidden, weight, target, upstream)
        rows = slice(0, CHECKED_ROWS)
        w = weight.detach().double()
        z = hidden.detach()[rows].double() @ w.t()
        log_p = torch.log_softmax(z, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        g_lp, g_h = (g[rows].double()[:, None] for g in upstream)
        dz = -log_p.exp() * (g_lp + g_h * (log_p + entropy[:, None]))
        dz.scatter_add_(1, target[rows, None], g_lp)
        case.truth = {
            "log_probs": log_p.gather(1, target[rows, None])[:, 0],
            "entropy": entropy,
            "hidden": dz @ w,
        }
        return case

    def free(self) -> None:
        self.hidden.grad = self.weight.grad = None


Results = tuple[Tensor, Tensor | None]


def ours(case: Case, wanted: Wanted | None = None, **keywords: Any) -> Results:
    call = Keywords(target=case.target, wanted=wanted or Wanted(), **keywords)
    options = LinearOptions(accumulate_into_main_grad=hasattr(case.weight, "main_grad"))
    result = fused_head(case.hidden, case.weight, None, options, call)
    return result.log_probs, result.entropy


def verl(case: Case) -> Results:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    log_probs, entropy = linear_cross_entropy(case.hidden, case.weight, case.target, 1.0, "none", None)
    return log_probs, entropy


def liger(case: Case) -> Results:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
        case.hidden, case.weight, case.target, 1.0, -100, 1, True
    )
    return -nll, entropy


def forward_only(head: Callable[[Case], Results], case: Case) -> Callable[[], Any]:
    def run() -> Results:
        with torch.no_grad():
            return head(case)

    return run


def whole_step(
    head: Callable[[Case], Results], case: Case, upstream: tuple[Tensor, Tensor] | None = None
) -> Callable[[], Any]:
    g_lp, g_h = upstream or case.upstream

    def run() -> Results:
        case.free()
        log_probs, entropy = head(case)
        if entropy is None:
            log_probs.backward(g_lp)
        else:
            torch.autograd.backward([log_probs, entropy], [g_lp.to(log_probs.dtype), g_h.to(entropy.dtype)])
        return log_probs, entropy

    return run


def products(case: Case) -> dict[str, Callable[[], Any]]:
    hidden, weight = case.hidden.detach(), case.weight.detach()

    def gradients(logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(logits, weight), torch.mm(logits.t(), hidden)

    def four() -> Any:
        torch.mm(hidden, weight.t())
        return gradients(torch.mm(hidden, weight.t()))

    return {
        "one product": lambda: torch.mm(hidden, weight.t()),
        "three products": lambda: gradients(torch.mm(hidden, weight.t())),
        "four products": four,
    }


def workspace_mib(run: Callable[[], Any], case: Case, gradients: bool) -> int:
    """Peak beyond the inputs, the results, and the gradients of hidden and weight."""
    case.free()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    kept = sum(x.nbytes for x in result if x is not None)
    if gradients:
        kept += sum(x.grad.nbytes for x in (case.hidden, case.weight) if x.grad is not None)
    return round((torch.cuda.max_memory_allocated() - before - kept) / 2**20)


@dataclass
class Errors:
    log_probs: float
    entropy: float
    hidden_gradient: float


def errors(head: Callable[[Case], Results], case: Case) -> Errors:
    log_probs, entropy = whole_step(head, case)()
    rows, truth = slice(0, CHECKED_ROWS), case.truth
    assert entropy is not None and case.hidden.grad is not None
    off = (case.hidden.grad[rows].double() - truth["hidden"]).norm() / truth["hidden"].norm()
    return Errors(
        float((log_probs[rows].detach().double() - truth["log_probs"]).abs().max()),
        float((entropy[rows].detach().double() - truth["entropy"]).abs().max()),
        float(off),
    )


def measure(shape: tuple[int, int, int], peers: bool, rounds: int) -> dict[str, Any]:
    case = Case.make(*shape)
    tokens = shape[0]
    half = torch.arange(tokens, device="cuda") % 2 == 0
    half_gradients = tuple(torch.where(half, g, 0.0) for g in case.upstream)
    unlimited = me.Execution(logits_budget_mib=2**20)
    heads: dict[str, Callable[[Case], Results]] = {"ours": ours}
    if peers:
        heads |= {"verl": verl, "liger": liger}
    report: dict[str, Any] = {"shape": shape}
    report["errors"] = {}
    for name, head in heads.items():
        try:
            report["errors"][name] = asdict(errors(head, case))
        except Exception as error:
            report["errors"][name] = f"{error!r:.200}"
    forward = {f"{name} forward": forward_only(head, case) for name, head in heads.items()}
    step = {f"{name} step": whole_step(head, case) for name, head in heads.items()}
    variants = {
        "kept": whole_step(lambda c: ours(c, execution=unlimited), case),
        "log-prob only": whole_step(lambda c: ours(c, Wanted(entropy=False)), case),
        "half masked": whole_step(lambda c: ours(c, mask=half), case),
        "half without gradient": whole_step(ours, case, half_gradients),  # type: ignore[arg-type]
        "ours forward again": forward_only(ours, case),
        "log-prob only forward": forward_only(lambda c: ours(c, Wanted(entropy=False)), case),
    }
    of = products(case)
    report["ms"] = interleaved({"one product": of["one product"], **forward}, rounds)
    report["ms"] |= interleaved({"four products": of["four products"], **step}, rounds)
    report["ms"] |= interleaved(
        {"three products": of["three products"], "ours again": step["ours step"], **variants}, rounds
    )
    report["workspace MiB"] = {
        "forward": workspace_mib(forward["ours forward"], case, gradients=False),
        "step": workspace_mib(step["ours step"], case, gradients=True),
    }
    case.free()
    case.weight.main_grad = torch.zeros_like(case.weight, dtype=torch.float32)
    report["workspace MiB"]["step into main_grad"] = workspace_mib(step["ours step"], case, gradients=True)
    report["ms"] |= {"main_grad step": interleaved({"x": step["ours step"]}, rounds)["x"]}
    return report


def line(report: dict[str, Any]) -> str:
    ms = report["ms"]

    def ratio(name: str, product: str) -> str:
        return f"{ms[name] / ms[product]:.3f}" if name in ms else "-"

    heads = [
        name.removesuffix(" forward")
        for name in ms
        if name.endswith(" forward") and "only" not in name and "again" not in name
    ]
    parts = [f"{report['shape']} product {ms['one product']:.2f} ms"]
    parts.append("forward/1: " + " ".join(f"{h} {ratio(f'{h} forward', 'one product')}" for h in heads))
    parts.append("step/4: " + " ".join(f"{h} {ratio(f'{h} step', 'four products')}" for h in heads))
    parts.append(f"main_grad/4 {ratio('main_grad step', 'four products')}")
    parts.append(f"kept/3 {ratio('kept', 'three products')}")
    for name in ("log-prob only", "half masked"):
        parts.append(f"{name}/all {ratio(name, 'ours again')}")
    backward = ms["ours again"] - ms["ours forward again"]
    half = ms["half without gradient"] - ms["ours forward again"]
    parts.append(f"backward, half without gradient/all {half / backward:.3f}")
    parts.append(f"MiB {report['workspace MiB']}")
    for name, value in report["errors"].items():
        numbers = value if isinstance(value, str) else " ".join(f"{x:.1e}" for x in value.values())
        parts.append(f"errors {name} {numbers}")
    return "\n    ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", help="N,H,V each; default: the six of docs/performance.md")
    parser.add_argument("--peers", action="store_true", help="time verl's and Liger's kernels too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write all numbers there")
    options = parser.parse_args()
    shapes = SHAPES
    if options.shapes:
        shapes = tuple(tuple(int(x) for x in spec.split(",")) for spec in options.shapes)
    reports = []
    for shape in shapes:
        reports.append(measure(shape, options.peers, options.rounds))
        print(line(reports[-1]), flush=True)
        torch.cuda.empty_cache()
    for name, product in (("ours forward", "one product"), ("ours step", "four products")):
        ratios = [r["ms"][name] / r["ms"][product] for r in reports]
        mean = statistics.geometric_mean(ratios)
        print(f"{name} / {product}: geometric mean {mean:.3f}, most {max(ratios):.3f}")
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
