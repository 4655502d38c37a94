"""The fused head under tensor parallelism, beside the products of one rank's shard, and beside verl's kernel.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.tensor_parallel [--peers] [--shapes ...]

A whole step is forward, backward and the hidden gradient's reduction; V is the whole vocabulary. Times are
rank 0's, taken in turn (tests/benchmarks/timing.py).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

import mcore_entropy as me
from tests.benchmarks.timing import interleaved

SHAPES = ((2048, 4096, 131072), (8192, 4096, 131072), (16384, 4096, 131072), (32768, 2048, 151936))


def longest(milliseconds: float) -> float:
    """The slowest rank's."""
    everyone = torch.tensor(milliseconds, device="cuda")
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return float(everyone)


def measure(shape: tuple[int, int, int], peers: bool, rounds: int) -> str:
    tokens, hidden_size, vocab = shape
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device="cuda").bfloat16()
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    upstream = torch.randn(tokens, device="cuda"), torch.randn(tokens, device="cuda") * 0.01
    torch.manual_seed(1 + rank)
    weight = torch.randn(vocab // ranks, hidden_size, device="cuda") * 2.0 * hidden_size**-0.5
    weight = weight.bfloat16().requires_grad_()
    whole = hidden.clone().requires_grad_()
    shard = hidden.chunk(ranks)[rank].clone().requires_grad_()
    w = weight.detach()

    def products() -> None:
        torch.mm(hidden, w.t())
        logits = torch.mm(hidden, w.t())
        torch.mm(logits, w)
        torch.mm(logits.t(), hidden)

    def ours(sequence_parallel: bool, backward: bool = True) -> Callable[[], None]:
        leaf = shard if sequence_parallel else whole

        def run() -> None:
            leaf.grad = weight.grad = None
            with torch.set_grad_enabled(backward):
                result = me.linear_log_probs_and_entropy(
                    leaf, weight, target, sequence_parallel=sequence_parallel, tp_group=dist.group.WORLD
                )
            if backward:
                torch.autograd.backward([result.log_probs, result.entropy], upstream)

        return run

    def verl() -> None:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        whole.grad = weight.grad = None
        results = linear_cross_entropy(whole, weight, target, 1.0, "none", dist.group.WORLD)
        torch.autograd.backward(results, upstream)
        dist.all_reduce(whole.grad)

    operations = {
        "one product": lambda: torch.mm(hidden, w.t()),
        "four products": products,
        "forward": ours(False, backward=False),
        "step": ours(False),
        "sequence parallel forward": ours(True, backward=False),
        "sequence parallel step": ours(True),
    }
    if peers:
        operations["verl step"] = verl
    ms = interleaved(operations, rounds, agreed=longest)
    torch.cuda.reset_peak_memory_stats()
    whole.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    ours(False)()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    text = f"TP {ranks} {shape}: four products of the shard {ms['four products']:.2f} ms"
    for name in operations:
        if name in ms and "product" not in name:
            base = ms["one product"] if "forward" in name else ms["four products"]
            text += f"; {name} {ms[name]:.2f} ms, {ms[name] / base:.3f}"
    return f"{text}; peak {peak:.0f} MiB, gradients included"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", action="store_true", help="time verl's kernel too")
    parser.add_argument("--shapes", nargs="+", help="N,H,V each")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    shapes = SHAPES
    if options.shapes:
        shapes = tuple(tuple(int(x) for x in spec.split(",")) for spec in options.shapes)
    for shape in shapes:
        text = measure(shape, options.peers, options.rounds)
        if dist.get_rank() == 0:
            print(text, flush=True)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
